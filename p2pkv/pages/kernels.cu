/* Gather and scatter: rows of paged KV memory <-> a dense rectangle [layer, unit, head, row_bytes].
 *
 * A run is what lies together on both sides: one row, or the rows of neighbouring heads of a unit.
 * The threads of a block stand in a grid, blockDim.x over the elements of a run and blockDim.y over
 * runs. Each thread works out once where its run lies and then copies every blockDim.x-th element, so
 * that the divisions are shared by several loads, which are under way together.
 *
 * The same text is compiled as C for a CPU by the tests; there P2PKV_AT checks every access.
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
 * whole:   units of a logical block, ratio kernel blocks of `kernel` units each.
 * origin:  bytes from a layer's first row to that of the first head. */
#define P2PKV_PARAMETERS                                                                             \
    p2pkv_int dense, const p2pkv_int *layers, const int *table, p2pkv_int rows, p2pkv_int units,     \
        p2pkv_int beside, p2pkv_int first, p2pkv_int whole, p2pkv_int kernel, p2pkv_int ratio,       \
        p2pkv_int block_stride, p2pkv_int unit_stride, p2pkv_int head_stride, p2pkv_int origin,      \
        p2pkv_int elements

static __device__ p2pkv_int p2pkv_page(
    p2pkv_u32 row, const p2pkv_int *layers, const int *table, p2pkv_u32 units, p2pkv_u32 beside,
    p2pkv_u32 first, p2pkv_u32 whole, p2pkv_u32 kernel, p2pkv_int ratio, p2pkv_int block_stride,
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
    p2pkv_int page = (p2pkv_int)table[block] * ratio;
    if (ratio > 1) {
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
                (p2pkv_u32)whole, (p2pkv_u32)kernel, ratio, block_stride, unit_stride, head_stride,  \
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
