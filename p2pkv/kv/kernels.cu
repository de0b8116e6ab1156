/* Gather and scatter: rows of paged KV memory <-> a dense rectangle [layer, unit, head, row_bytes].
 *
 * A run is what lies together on both sides: one row, or the rows of neighbouring heads of a unit.
 * The threads of a block stand in a grid, blockDim.x over the elements of a run and blockDim.y over
 * runs. Each thread works out once where its run lies and then copies every blockDim.x-th element, so
 * that the divisions are shared by several loads, which are under way together.
 *
 * And the checksum of a buffer, a fold of its words: see checksum.py.
 *
 * The same text is compiled as C for a CPU by the tests; there P2PKV_AT checks every access, and
 * P2PKV_ADD is a plain addition.
 */

#ifdef __cplusplus
#define P2PKV_KERNEL extern "C" __global__
#else
#define P2PKV_KERNEL __global__
#endif

#ifndef P2PKV_AT
#define P2PKV_AT(TYPE, address) (*(TYPE *)(address))
#endif

typedef long long p2pkv_int;
typedef unsigned int p2pkv_u32;

/* layers:  int64 [layers], the address of each layer's first row.
 * table:   int32 [blocks], logical block ids; entry 0 is the block of unit 0.
 * rows:    runs in the rectangle, layers * units * beside; below 2^31, so 32-bit divisions do.
 * units:   units of the rectangle. beside: runs of one unit.
 * first:   the first unit, counted from the start of its logical block.
 * whole:   units of a logical block, in kernel blocks of `kernel` units each.
 * apart:   kernel blocks from a logical block to the next.
 * origin:  bytes from a layer's first row to that of the first head. */
#define P2PKV_PARAMETERS                                                                             \
    p2pkv_int dense, const p2pkv_int *layers, const int *table, p2pkv_int rows, p2pkv_int units,     \
        p2pkv_int beside, p2pkv_int first, p2pkv_int whole, p2pkv_int kernel, p2pkv_int apart,       \
        p2pkv_int block_stride, p2pkv_int unit_stride, p2pkv_int head_stride, p2pkv_int origin,      \
        p2pkv_int elements

static __device__ p2pkv_int p2pkv_page(
    p2pkv_u32 row, const p2pkv_int *layers, const int *table, p2pkv_u32 units, p2pkv_u32 beside,
    p2pkv_u32 first, p2pkv_u32 whole, p2pkv_u32 kernel, p2pkv_int apart, p2pkv_int block_stride,
    p2pkv_int unit_stride, p2pkv_int head_stride, p2pkv_int origin)
{
    p2pkv_u32 head = 0;
    if (beside > 1) {
        head = row % beside;
        row /= beside;
    }
    p2pkv_u32 layer = row / units;
    p2pkv_u32 unit = row - layer * units + first;
    p2pkv_u32 block = unit / whole;
    p2pkv_u32 inside = unit - block * whole;
    p2pkv_int page = (p2pkv_int)table[block] * apart;
    if (apart > 1) {
        page += inside / kernel;
        inside %= kernel;
    }
    return layers[layer] + origin + page * block_stride + inside * unit_stride + head * head_stride;
}

#define P2PKV_TOGETHER 4 /* loads of a thread that are under way together */

/* to and from: what is written and what is read, of the two addresses `pages` and `packed`. */
#define P2PKV_DEFINE(NAME, TYPE, to, from)                                                           \
    P2PKV_KERNEL void NAME(P2PKV_PARAMETERS)                                                         \
    {                                                                                                \
        p2pkv_u32 step = gridDim.x * blockDim.y, count = (p2pkv_u32)elements;                        \
        for (p2pkv_u32 row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += step) {       \
            p2pkv_int pages = p2pkv_page(                                                            \
                row, layers, table, (p2pkv_u32)units, (p2pkv_u32)beside, (p2pkv_u32)first,           \
                (p2pkv_u32)whole, (p2pkv_u32)kernel, apart, block_stride, unit_stride, head_stride,  \
                origin);                                                                             \
            p2pkv_int packed = dense + row * elements * (p2pkv_int)sizeof(TYPE);                     \
            TYPE *__restrict__ target = (TYPE *)to;                                                  \
            const TYPE *__restrict__ source = (const TYPE *)from;                                    \
            for (p2pkv_u32 at = threadIdx.x; at < count; at += P2PKV_TOGETHER * blockDim.x) {        \
                TYPE some[P2PKV_TOGETHER];                                                           \
                for (int i = 0; i < P2PKV_TOGETHER; ++i)                                             \
                    if (at + i * blockDim.x < count)                                                 \
                        some[i] = P2PKV_AT(const TYPE, source + at + i * blockDim.x);                \
                for (int i = 0; i < P2PKV_TOGETHER; ++i)                                             \
                    if (at + i * blockDim.x < count)                                                 \
                        P2PKV_AT(TYPE, target + at + i * blockDim.x) = some[i];                      \
            }                                                                                        \
        }                                                                                            \
    }

#define P2PKV_BOTH(WIDTH, TYPE)                                                                      \
    P2PKV_DEFINE(p2pkv_gather_##WIDTH, TYPE, packed, pages)                                          \
    P2PKV_DEFINE(p2pkv_scatter_##WIDTH, TYPE, pages, packed)

P2PKV_BOTH(16, uint4)
P2PKV_BOTH(8, uint2)
P2PKV_BOTH(4, unsigned int)
P2PKV_BOTH(2, unsigned short)
P2PKV_BOTH(1, unsigned char)

typedef unsigned long long p2pkv_u64;

#ifndef P2PKV_ADD
#define P2PKV_ADD(sum, value) p2pkv_add(sum, value)

/* One addition for a warp, all of whose threads must come here. */
static __device__ void p2pkv_add(p2pkv_u64 *sum, p2pkv_u64 value)
{
    for (int beyond = 16; beyond > 0; beyond /= 2)
        value += __shfl_down_sync(0xffffffffu, value, beyond);
    if (threadIdx.x % 32 == 0)
        atomicAdd(sum, value);
}
#endif

/* Word `at` of `size` bytes, little-endian; behind the last byte there are zeros. */
static __device__ p2pkv_u64 p2pkv_word(p2pkv_int bytes, p2pkv_int size, p2pkv_int at)
{
    p2pkv_int first = bytes + 8 * at, left = size - 8 * at;
    p2pkv_u64 word = 0;
    if (first % 8 == 0 && left >= 8)
        return P2PKV_AT(const p2pkv_u64, (const p2pkv_u64 *)first);
    for (int i = 0; i < 8 && i < left; ++i)
        word |= (p2pkv_u64)P2PKV_AT(const unsigned char, (const unsigned char *)first + i) << (8 * i);
    return word;
}

/* A word and its place, counted from 1. Each step can be undone, so no two words of a place are mixed alike. */
static __device__ p2pkv_u64 p2pkv_mixed(p2pkv_u64 word, p2pkv_int place)
{
    word ^= (p2pkv_u64)place * 0x9E3779B97F4A7C15ull;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBull;
    return word ^ (word >> 31);
}

/* Adds the fold of `size` bytes at the address `bytes` to the word at the address `sum`. */
P2PKV_KERNEL void p2pkv_digest(p2pkv_int bytes, p2pkv_int size, p2pkv_int sum)
{
    p2pkv_int words = (size + 7) / 8, step = (p2pkv_int)gridDim.x * blockDim.x;
    p2pkv_u64 found = 0;
    for (p2pkv_int at = (p2pkv_int)blockIdx.x * blockDim.x + threadIdx.x; at < words;
         at += P2PKV_TOGETHER * step) {
        p2pkv_u64 some[P2PKV_TOGETHER];
        for (int i = 0; i < P2PKV_TOGETHER; ++i)
            if (at + i * step < words)
                some[i] = p2pkv_word(bytes, size, at + i * step);
        for (int i = 0; i < P2PKV_TOGETHER; ++i)
            if (at + i * step < words)
                found += p2pkv_mixed(some[i], at + i * step + 1);
    }
    P2PKV_ADD((p2pkv_u64 *)sum, found);
}
