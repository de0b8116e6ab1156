"""Changes that tests must notice, for mutants.py: the product's, and faults that tests say they inject.

== the file > the tests of the next ones, as pytest names them
> others, for those that follow
Class.function: what is wrong then
~ the text as it is, once in this function => and as it becomes
or, for more than a line of it:
- the text as it is
+ and as it becomes; without such a line it goes
"""

PRODUCT = r'''
== p2pkv/links/ipc_ends.py > tests/links/test_ipc.py
IpcOutbound._announce: over CUDA IPC D learns of a message before the gather is done
~ if send.written is None or not send.written.ready(): => if send.written is None:
IpcContext.reap: over CUDA IPC a slot is granted again while the scatter reads it
~ while self._read and self._read[0][0].ready(): => while self._read:
IpcOutbound._open: a link that has ended keeps D's memory mapped
~ self._opened = None => pass
IpcOutbound._leave: P unmaps D's memory while its copies run
~ wait_out(written) => pass
> tests/links/test_ipc.py tests/links/test_processes.py
IpcInbound._free: over CUDA IPC slots come back while a P that D has aborted may write there
~ awaited = self._line if self._posted and not self._left else None => awaited = None
== p2pkv/sharding.py > tests/connector/test_context_parallel.py::test_ranks_are_numbered_as_in_vllms_groups
Shape.part: the ranks of a decode-context-parallel group are numbered as those of a stage
~ (tp_rank * self.pcp + pcp_rank) % self.dcp => rank % self.dcp
== p2pkv/plan.py > tests/unit/test_plan.py::test_every_cell_arrives_once_where_it_belongs
_edges: a rank of P is taken to hold all tokens of its heads
~ if prefill.dcp > 1: => if False:
== p2pkv/interleave.py > tests/connector/test_context_parallel.py
Part.positions: a rank's own tokens are numbered as if single ones took turns
~ tokens // self.cycle * self.run + tokens % self.run => tokens // self.ranks
== p2pkv/protocol/extents.py > tests/protocol/test_cut.py
Cutter.take: P takes a cut of D's into larger chunks than it offered
~ if total > max(limit, self.extents.by_group[pieces[0].group].row): => if False:
Cutter.take: P refuses a row of D's cut that is larger than a chunk
~ max(limit, self.extents.by_group[pieces[0].group].row) => limit
Cutter.take: P takes a cut of D's that overlaps what was announced
~ if announced[layers].count(piece.start) < piece.layer_stop - piece.layer: => if False:
> tests/engine/test_many_ranks.py::test_context_parallel_ranks
Extent.sendable: common tokens count as computed when as many tokens of the prompt are
~ computed = self.tokens.count(computed) => pass
> tests/protocol/test_extents.py
Cutter._cut: pieces of narrow rows come first in a chunk
~ key=self._alignment, reverse=True => key=self._alignment
> tests/engine/test_kv_groups.py::test_a_load_of_which_the_state_alone_does_not_come_or_comes_wrong_fails
Coverage.__init__: a load is done although its state is missing
-         self.left = extents.nbytes
-         self._taken
+         self.left = sum(each.nbytes for each in extents.by_group.values() if each.ready is None)
+         self._taken
> tests/engine/test_kv_groups.py
Extent.sendable: a state travels before the last token of the prompt is computed
~ return self.start => return self.ceiling if computed else self.start
== p2pkv/engine/decode.py > tests/engine/test_many_ranks.py::test_context_parallel_ranks
Decode._rectangle: D writes to where P has read
~ edge.tokens.on_target(*span) => edge.tokens.on_source(*span)
> tests/engine/test_cost.py::test_p_sends_a_message_before_it_gathers_the_next_and_d_grants_before_it_writes
Decode.posted: a grant waits for the write before it
~ self._ctx.effects.appendleft( => self._ctx.effects.append(
> tests/connector/test_data_parallel.py::test_p_is_released_whichever_of_its_engines_d_has_asked
Decode.redirected: D has ended its part, and the engine of P that has the request is not sent that
~ self._release_other_engine(message.key, engine, now) => pass
> tests/virtual/test_engine_cores.py
Decode._send_heartbeats: D asks for its prompts although its engine core is stopped (K4)
~ if self._ctx.steps.trouble(now): => if False:
> tests/engine/test_prefetch.py::test_admitted_requests_go_before_it
Decode._apply_decisions: nothing is reserved for admitted requests
~ reserve = RESERVED_CHUNKS * self._ctx.options.chunk_bytes if entry.prefetch else 0 => reserve = 0
> tests/engine/test_kv_groups.py::test_a_load_of_which_the_state_alone_does_not_come_or_comes_wrong_fails
Decode.land: the checksum of a chunk that holds a state alone is not compared
~ peer.verify else => peer.verify and not all(peer.formats[each.group].once for each in chunk.pieces) else
> tests/engine/test_prefetch.py
Decode.invalidate: early buffers survive a change of weights
~ self._apply_decisions(entry, entry.receiver.cancel(command.reason), now) => pass
== p2pkv/kv/layouts.py > tests/kv/test_rectangles.py tests/kv/test_kernels.py
Runs.of: a run of tokens may lie in two blocks
~ run = gcd(pages.units, self._longest) => run = self._longest
> tests/connector/test_attention_rows.py
plane_of: a block's scales are read and written one row further
~ storage_offset()) + kernel * before => storage_offset()) + (kernel * before + width if before else 0)
> tests/kv/test_rectangles.py
spans_of: layers that lie unevenly are copied as if they were evenly spaced
~ even = apart.pop() if len(apart) == 1 else None => even = apart.pop()
== p2pkv/connector/describe.py > tests/connector/test_describe.py::test_context_parallel_ranks
block_tables: a block of the scheduler has as many tokens as one of a rank
~ spec.block_size * token_parts(config, spec) => spec.block_size
> tests/connector/test_describe.py::test_a_group_of_which_this_stage_has_no_layer_is_passed_over
computes_last_token: the scheduler looks at the layers of stage 0 alone
~ group.layer_names or ("",) => group.layer_names
> tests/connector/test_describe.py::test_a_model_that_spreads_heads_otherwise_is_refused
_model_heads: slots count as heads
~ held == getattr(spec, "num_kv_heads", 0) and (held > 1 or tp == 1) => held > 1 or tp == 1
> tests/connector/test_describe.py::test_a_ping_has_the_engines_http_server_and_its_number_there
replica: a hybrid server gets the number of an engine in the whole instance
~ data_parallel_rank_local if own_only else parallel.data_parallel_index => data_parallel_index
> tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block
local_groups: rings are left out
~ once += ring_groups( => [] and ring_groups(
local_groups: an indexer's keys are left out
~ if not keeps_state(spec): => if not keeps_state(spec) and spec.head_size != 132:
> tests/connector/test_attention_rows.py
make_ready: vLLM sets scales that have been loaded to 1
~ impl._ensure_scale_caches(layer.kv_cache) => pass
== p2pkv/protocol/handshake.py > tests/protocol/test_handshake.py
_seen: rings of different sizes are not refused
~ if group.once and group.window: => if False:
_same_of_groups: P and D may have different attention windows
~ _seen(mine), _seen(theirs), SAME_RINGS => 0, 0, SAME_RINGS
> tests/protocol/test_handshake.py::test_only_plain_rows_of_tokens_are_divided_over_ranks
_check_divided_tokens: tokens of a window are divided over ranks
~ group.once or group.window or => group.once or
> tests/protocol/test_row_format.py
RowFormat.needed: a row is sent of which D has tokens to compute
~ stop = stop // self.unit * self.unit => stop = -(-stop // self.unit) * self.unit
RowFormat.needed: a chunk that attention sees is taken for a sliding window
~ if self.chunked else => if False else
> tests/virtual/test_walks.py
RowFormat.needed: D wants what has left a window, and P has given back
~ first = first // whole * whole if self.window else 0 => first = 0
== p2pkv/connector/stage_layers.py > tests/connector/test_drafters.py::test_stages_of_a_model_with_a_drafter
layer_order: a draft model's layers come before the model's
~ name.startswith(DRAFTERS), [ => False, [
_whole: stages whose layers are out of order are taken as they are
~ if names != ordered: => if False:
== p2pkv/config.py > tests/connector/test_describe.py::test_the_ports_of_a_data_parallel_engine
Options.address: the engines of a data-parallel instance listen on the same ports
~ Address(self.host, self.kv_port + self.engine_index * self.engine_ranks) => Address(self.host, self.kv_port)
== p2pkv/engine/prefill.py > tests/virtual/test_both_roles.py
Prefill.forget: a key that goes in both directions is forgotten in both at once
~ if command.role == "D": => if False:
> tests/connector/test_data_parallel.py::test_each_engine_of_p_serves_each_engine_of_d
Prefill.hold: the engine in the id is not sent which engine has the request
~ command.named is not None => False
Prefill._is_for: a prompt is for the engine of D in the id alone
~ if entry.peers or not is_engine_of(entry.decode, peer.hello): => if True:
> tests/virtual/test_engine_cores.py
Prefill.heartbeat: P confirms requests although its engine core is stopped (K4)
~ if not self._ctx.steps.trouble(now): => if True:
> tests/engine/test_page_ownership.py
Prefill.fill: pages are taken back in the middle of a gather
~ with revoked.reading: => if True:
== proxy/relay.py > tests/proxy/test_membership.py::test_each_request_goes_to_the_engines_that_its_id_names
to_instance: the proxy sends no X-data-parallel-rank
~ if instance.replica is not None: => if False:
> tests/proxy/test_blame.py::test_a_client_that_reads_slowly_is_not_ds_silence
Relay._watch: a client that reads slowly counts as a silent D
~ (waited, 0.0) if self._writing => (waited, waited) if self._writing
> tests/proxy/test_blame.py::test_a_stream_without_more_events_ends_with_an_error
Relay._relay_stream: comments of D's server count as events
~ if chunk.startswith(b":") and b"data:" not in chunk: => if False:
== p2pkv/connector/connector.py > tests/virtual/test_full_of_each_other.py
P2pKvConnector._schedule: two instances of both roles may hold all their blocks for each other
~ held_blocks = (held_blocks - 1) // 3 => held_blocks = held_blocks - 1
P2pKvConnector._kv_both_quotas: with kv_both loads may take all blocks
~ return BlockQuota(third, blocks), BlockQuota(third, blocks => return BlockQuota(third, blocks), BlockQuota(
P2pKvConnector._kv_both_quotas: with kv_both prompts for others may take all blocks
~ return BlockQuota(third, blocks), BlockQuota(third, blocks => return BlockQuota(), BlockQuota(third, blocks
> tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block
P2pKvConnector.get_loaded_kv_cache_group_ids: vLLM does not zero the blocks of D's loads
~         return self._replayed =>         return tuple(range(len(self._kv_cache_config.kv_cache_groups)))
> tests/connector/test_idle_steps.py
P2pKvConnector._skip_next_wait: the engine core sleeps although it has just had an event
~         patches.ENGINE_CORE.seconds = 0.0 =>
> tests/connector/test_decode_side.py
P2pKvConnector.has_pending_push_work: a pause that keeps requests does not wait for KV that comes in
~ self.consumer is not None and self.consumer.loads => False
== p2pkv/protocol/receiver.py > tests/protocol/test_cut.py
Source.cut: what was foreseen is cut, whatever is wanted
~ self._foreseen is not None and self._foreseen[:2] == (extents, self.ready) => self._foreseen is not None
Receiver.offer: a D that was offered a prompt before never learns that it is ready
~ source.ready = message.ready or 0 => source.ready = source.ready if source.offered else message.ready or 0
> tests/virtual/test_engine_cores.py
Receiver._bound: a request that D never admits waits without end (K3)
~ return None if self.prefetch or self._idle else self.waits_since + self.terms.wait => return None
> tests/protocol/test_receiver.py
Source.announced: D counts chunks that P has sent against what P may announce
~ self._unsent >= MAX_CHUNKS => len(self.chunks) >= MAX_CHUNKS
== p2pkv/protocol/sender.py > tests/protocol/test_cut.py
Sender._offer: P says of a prompt that it computes that D may cut it
~ self.prompt.state is PromptPhase.COMPUTED and send.limit => send.limit
Sender._renew: D is not told that a prompt is ready when the link comes up
~ if opened and computed and send.cutter is None: => if False:
> tests/virtual/test_engine_cores.py
Sender.kept_until: P keeps blocks for as long as any D claims them (K3)
~ end = self._moved + self.terms.wait => end = self._moved + 1e9
Sender.kept_until: a paused P keeps blocks for a D that takes nothing (K3)
~ min(end, max(self._moved, paused_since) + self.terms.lease) => end
> tests/engine/test_kv_groups.py
SendState.drained: P's blocks are free while a chunk of a KV group beside the first is to be read
-         return self.cutter is not None and not self.cutter.left and not self.announced
+         under_way = {piece.group for _, pieces in self.announced.values() for piece in pieces}
+         return self.cutter is not None and not self.cutter.left and 0 not in under_way
== p2pkv/connector/held_blocks.py > tests/connector/test_held_blocks.py
HeldBlocks.full: one D may hold all blocks of P (K3)
~ if not mine or mine < self._share * (self._total - others): => if True:
BlockQuota.admits: of requests that wait for blocks a short one overtakes a long one
~ if first == request_id and => if
BlockQuota.admits: a load takes blocks although all loads have as many as they may
~ if first == request_id and self.taken + other_blocks + self.blocks(tokens) <= self.limit: => if True:
== p2pkv/connector/scheduler.py > tests/virtual/test_full_of_each_other.py
ProducerScheduler.matched: with kv_both blocks of finished prompts do not count beside those of running ones
~ other_blocks=self._held.all => other_blocks=0
> tests/connector/test_multi.py::test_what_a_store_fills_on_p_is_pushed_only_once_vllm_has_taken_the_step
ProducerScheduler._prefill: P pushes what another connector is still loading
~ if any(not filled.isdisjoint(table) for filled in self._filled for table in blocks): => if False:
> tests/connector/test_multi.py::test_a_failed_load_on_p_never_reaches_d
ProducerScheduler.__init__: P forgets in the next step already what another connector was loading
~ deque(maxlen=batches) => deque(maxlen=1)
> tests/connector/test_prefill_side.py
leave_out_last: of a mixed prompt P keeps the marks of the tokens that it leaves to D
~         request.prompt_is_token_ids = request.prompt_is_token_ids[:-tokens] =>         pass
ProducerScheduler.step: P reads the block tables of a step again for each prompt
~ cache(partial(self._fresh, output)) => partial(self._fresh, output)
> tests/connector/test_deferring_queue.py
ConsumerScheduler.reported: a request of which one rank of P has begun is looked up again
~ if len(pending.begun) >= self._world or self._failure(pending): => if True:
ConsumerScheduler.reported: further children of n wait on when the first has loaded
~ decided += self._children.get(pending.paired.key, ()) => pass
ConsumerScheduler.finished: further children of n wait on when the first was aborted
~ [*self._quota.next_waiting, *self._children.get(pending.paired.key, ())]) => self._quota.next_waiting)
ConsumerScheduler.allocated: further children of n wait on when the first needs nothing from P
~ update(self._quota.next_waiting, self._children.get(key, ())) => update(self._quota.next_waiting)
ConsumerScheduler.allocated: within a pass of vLLM's a request comes into the queue before the one that it looks at
- self._decided_now.update(self._quota.next_waiting, self._children.get(key, ()))
+ self._decide([*self._quota.next_waiting, *self._children.get(key, ())])
> tests/connector/test_decode_side.py
ConsumerScheduler.fail: a request whose P has failed is not looked at again
~ self._decide([request_id]) => pass
> tests/connector/test_weights_change.py tests/connector/test_weights_real_ranks.py
ConsumerScheduler._failure: D loads what P has computed with other weights
~ others = {*pending.begun} - {None, self._generation} => others: set[str | None] = set()
ProducerScheduler.invalidate: P sends what it has computed with former weights
~ if prompt.offered and not prompt.stale: => if False:
> tests/connector/test_weights_change.py
ConsumerScheduler.reported: vLLM hears that a load of former weights has come
~ if pending.stale and request_id not in failed: => if False:
== p2pkv/links/staging.py > tests/links/test_staging.py
StagingShare.grants: a message that staging can never hold waits without end
~ if need > budget.most: => if False:
StagingBudget.carry_both_ways: receives may fill the staging of a rank that sends, too
~ self.limit - aligned(self.limit // 4) => self.limit
StagingShare.grants: a link may take all that is left of the staging, whatever it holds
~ self.held + need <= left => need <= left
MappedPool.take: the memory of a pool counts as idle since its first use
~             self._idle_since = None =>
> tests/engine/test_backpressure.py::test_ps_that_hold_receives_leave_room_for_another_and_all_keep_to_the_budget
StagingShare.grants: D's staging is granted without a budget
~ return left >= 0 and (not self.held or self.held + need <= left) => return True
StagingShare.grants: one P may hold all of D's staging
~ return left >= 0 and (not self.held or self.held + need <= left) => return left >= 0
== p2pkv/engine/computed_layers.py > tests/connector/test_worker.py
ComputedLayers._device_waits: pushes hold up a forward thread for which the GPU waits
~ is not PASSED and => is PASSED and
ComputedLayers.ended: P pushes what a forward that has raised has not computed
~ sys.exception() in (None, self._handled) => True
== p2pkv/engine/core.py > tests/virtual/test_both_roles.py
Core._receive_unowned: two ranks of both roles answer each other's Stranger without end
~ elif self.prefill is not None and not isinstance(message, UnknownPeer): => elif self.prefill is not None:
> tests/virtual/test_engine_cores.py
Core._check_engine: an engine without its server holds what it has (X13)
~ self.leave(now + self.clock.held) => pass
> tests/engine/test_cost.py
Core._apply: D's grants wait until it has written what came before
~ self._flush_outbox(now)  # peers copy meanwhile => pass
> tests/engine/test_page_ownership.py
Core._blocked: gathers ignore the forward's fence
~ return isinstance(head, Computed) and not head.fence.ready() => return False
Core.revoke: pages that are taken back are not marked
~ self.context.revoked.add(keys) => pass
== proxy/routing.py > tests/proxy/test_registry.py::test_each_of_a_pool_comes_to_have_either_role
Router.choose: a pool of instances of both roles never pushes under load
~ return self._other_prefill(decode, prefillers, request) => return Choice(None, decode, single_instance=True)
> tests/proxy/test_placement.py
Router.choose: with placement by cost a D computes what a P has failed
~ self._decode_alone if mode is PrefillMode.WANTED else 0 => self._decode_alone
Router._fleet: with placement by cost a request comes back to what has failed it
~ cache.fleet(request.model, avoid) => cache.fleet(request.model, frozenset())
> tests/proxy/test_routing.py::test_what_is_kept_is_what_is_true
FleetCache.is_valid: the router goes on with instances that have changed since
~ self._version == self.registry.version => True
FleetCache.is_valid: one that has fallen silent since counts as well
~ <= now <= self._until => <= now
FleetCache.is_valid: how those in doubt are is looked up once
~ self._doubtful.items() => ()
> tests/proxy/test_routing.py::test_who_needs_a_p_is_not_left_to_a_d_alone_where_all_ps_are_in_doubt
Router._able: who needs a P is left to a D alone
~ if mode is PrefillMode.NEEDED: => if False:
> tests/proxy/test_registry.py::test_in_a_large_fleet_requests_go_to_pairs_that_have_links
Router.choose: in a fleet larger than max_links a request goes to a pair without a link
~ elif fleet.linked_pairs is not None => elif False
== proxy/placement.py > tests/proxy/test_placement.py
PlacementCosts._prompt_part: a prompt's cost forgets the answers that it stops
~ + self.pause_weight * engine.answers * prompt =>
PlacementCosts.cheapest: with placement by cost a D computes prompts beyond its share
~ each.role == "both" or each.decode_alone < decode_alone => True
PlacementCosts._prompt_part: what is queued at an instance costs nothing
~ queued + prompt => prompt
EngineCosts.queued_seconds: a prompt that is long overdue costs nothing
~ abs(first - since) => max(0.0, first - since)
EngineCosts.queued_seconds: what instances report of their queues is not used
~ if self._reports(now): => if False:
EngineCosts._is_new: a prompt counts beside the report that has it
~ prompt.placed > self.report.at - _ON_ITS_WAY => True
PlacementCosts.cheapest: what an instance has of a prompt in its cache costs as much as the rest
~ tokens - cached.get(p, 0)) for p, at, queued in looked => tokens) for p, at, queued in looked
PlacementCosts._answers: a hand-over costs nothing
~ self._hand_over_counts * late + cost => cost
PlacementCosts._hand_over_counts: a hand-over behind P's token counts as one before the first token
~ self.from_prefill * (_FIRST_TOKEN - 1.0) => 0.0
PlacedRequest.first_token: D counts as decoding when the client has P's token
~ self._shown = True => self._shown, self._begun = True, self._begun or self._decode.marks(now)
PlacementCosts._answer_part: answers beside it do not make an answer slower
~ (2 * engine.answers + 1) => 1
PlacementCosts._answer_part: prompts at the same instance do not make an answer slower
~ stopped *= share * (1.0 + self.pause_weight) => stopped = 0.0
PlacementCosts.cheapest: placement by cost pairs instances that do not match
~ if each is not prefill and each.matches(prefill) => if each is not prefill
EngineCosts.answer_ended: the time that prompts took counts as that of steps
~ share = min(1.0, prompts / lasted) => share = 0.0
LeastSquares.learn: what was observed is never forgotten
~ _FORGET * products[column] + => products[column] +
LeastSquares.learn: one stall decides what is predicted
~ seen = min(seen, 4.0 * self.predict(*features) + 0.1) => pass
LeastSquares._solved: more work may be predicted to take less time
-         if found[least] < 0.0 and used[1:]:
-             return self._solved([column for column in used if column != least])
-         return [max(0.0, found.get(column, 0.0)) for column in self._columns]
+         return [found.get(column, 0.0) for column in self._columns]
PlacedRequest.computed: a guess at when a prompt was computed teaches
~ learn=learn => learn=True
EngineCosts.answer_ended: what an answer lasted teaches nothing
~ if steps >= _LEAST_STEPS and lasted > 0.0: => if False:
PlacedRequest.leave: a request that has left still counts as queued
~ self._prefill.prompt_left(self._queued, now) => pass
> tests/proxy/test_registry.py
PlacementCosts.cheapest: in a large pool placement by cost passes links over
~ self._answers(self._looked(near(prefill), now), tokens, now) if near else answers => answers
== p2pkv/connector/core_beats.py > tests/connector/test_core_beats.py
workload_of: a prompt that comes from a P counts as queued at D
~  and not is_loaded(request.request_id) =>
state_of: requests that the engine core takes from nobody's queue are no work (K4)
~  or not core.input_queue.empty() =>
BeatListener.read: a rank takes beats from any process (K4)
~ if process not in self._senders: => if False:
BeatSender._run: an engine core does not notice that its server is gone (X13)
~ self._parent not in (None, os.getppid()) => False
== p2pkv/engine/core_liveness.py > tests/virtual/test_engine_cores.py
Liveness.trouble: a stopped engine core is vouched for (K4)
~ if now - self._beaten > silence: => if False:
Liveness.trouble: an engine core that hangs is vouched for (K4)
~ if self.beat.work and now - self._moved > stall: => if False:
Liveness.trouble: a paused engine core is vouched for without end (K4)
~ if self.paused_since is not None and now - self.paused_since > stall: => if False:
== p2pkv/control/announcer_child.py > tests/control/test_announcer.py
_Worker.follow: the process that announces outlives a worker that has not read all it was sent
~ contextlib.suppress(ConnectionError) => contextlib.suppress(KeyError)
_Worker.ping: an instance in trouble is announced (K4)
~ if silent or last.trouble: => if silent:
== proxy/membership/prober.py > tests/proxy/test_blame.py::test_of_a_d_that_hangs_another_one_answers
Prober._doubt: requests stay at a D whose engine hangs behind a server that answers (K4)
~ instance.lost("hung") => pass
Prober._doubt: requests wait for ever at a D whose engine hangs behind a living server
~       if instance.left is None and self._overdue(instance, now := self._clock()) =>       if False
> tests/proxy/test_membership.py::test_an_answer_that_comes_within_a_second_of_the_goodbye_is_taken
Prober._doubt: an answer has no second of grace after the goodbye
~                 if refused and now - instance.left >= _GOODBYE_SECONDS: =>                 if refused:
> tests/proxy/test_membership.py::test_a_frozen_leaver_loses_its_requests_after_a_lease
Prober._doubt: a leaver that freezes with its port open keeps its requests
~                 elif not refused and self._registry.overdue(instance, now): =>                 elif False:
== proxy/membership/registry.py > tests/proxy/test_registry.py::test_a_zmq_address_is_its_holders_too
Registry._holder: another spelling of an instance's address is another address
~ each.zmq_address == newcomer.zmq_address => each.ping.zmq_address == newcomer.ping.zmq_address
> tests/proxy/test_blame.py::test_a_paused_instance_gets_nothing_until_it_is_resumed
Registry.candidates: a paused instance gets requests (K3)
~ not (each.drained or each.paused) => not each.drained
== p2pkv/connector/worker.py > tests/engine/test_thread.py
Worker.begin: a rank whose thread has ended takes part in steps (K9)
~ self.rank.failure or self._computed.failure => self._computed.failure
> tests/connector/test_weights_real_ranks.py
Worker.wake: blocks of prompts that P had before its sleep are never free
~ self._free.add(key) => pass
== p2pkv/engine/thread.py > tests/engine/test_thread.py
Rank.trouble: a rank whose thread has ended is announced (K9)
~ if self.failure or not self.alive: => if False:
Rank.__init__: a thread that cannot begin does not fail the start (K9)
~ if self.failure: => if False:
> tests/engine/test_thread.py::test_an_event_ends_the_forward_threads_wait
Rank._report: an event does not end the wait of an idle step
~ self._event_set.set() => pass
> tests/engine/test_thread.py::test_an_event_is_called_out_once_until_it_has_been_heard
Rank._report: a worker with news does not ring
~ self.on_event(event) => pass
== p2pkv/connector/multi.py
> tests/connector/test_multi.py::test_d_does_not_wait_for_p_where_the_store_has_the_whole_prompt
MultiConnector.get_num_new_matched_tokens: D waits for P although its store has the whole prompt
~ if undecided and not (whole and all(undecided)): => if undecided:
== p2pkv/engine/preconnect.py > tests/engine/test_preconnect.py
Preconnect._begin: links are built ahead of requests although there are max_links
~ if room < partner.sources or fresh >= AT_ONCE: => if fresh >= AT_ONCE:
Preconnect._take: each list of partners puts off the end of those that are not in it
~ min(partner.until, now + LEFT_SECONDS if len(left) <= 4096 else now) => now + LEFT_SECONDS
Preconnect._begin: P's that the proxy names no more are dialed
~  or partner.until < inf =>
Preconnect._look_at: a P that a request needs is given up as one that was dialed ahead
~ elif any(peer.needed for peer in peers): => elif False:
Preconnect._meet: links are built ahead to a P with more ranks than max_links
~ if len(edges) > self._ctx.options.max_links: => if False:
Preconnect._all_up: one link of several makes a P count as linked
~ return all(peer.link.up => return any(peer.link.up
Preconnect._look_at: the pause after a failed try stays long once a link was up
~ 0.0, FIRST_PAUSE, False => 0.0, partner.pause, False
Preconnect._give_up: the pause between two tries does not grow
~ min(2 * partner.pause, LAST_PAUSE) => partner.pause
Preconnect._give_up: the pause between two tries grows without bound
~ min(2 * partner.pause, LAST_PAUSE) => 2 * partner.pause
Preconnect._let_go: D hangs up on ranks of P that requests need
~ if not peer.needed: => if True:
== p2pkv/links/tcp.py > tests/links/test_host.py
TcpSend.commit: over TCP messages wait until P has gathered all that it may
~         self._link.poll() =>         pass
== p2pkv/engine/to_decode.py > tests/engine/test_backpressure.py
OutboundLink.next_send: a message that P's staging can never hold stops P's whole rank
~ except ValueError as error: => except ZeroDivisionError as error:
> tests/engine/test_preconnect.py
DecodePeers.hello: on P a link that is built ahead takes another's place
~ parked=full => parked=False
> tests/engine/test_nccl.py
DecodePeer.go_on: P launches sends together although D cannot
~ self.hello.together is True => True
== p2pkv/engine/roles.py > tests/engine/test_preconnect.py
DecodeRole.look: a link that no request uses is closed after a minute although the proxy names its P
~  or self.preconnect.keeps(peer) =>
== p2pkv/connector/identity.py > tests/connector/test_describe.py
_fingerprint: the configuration that vLLM has built does not count
~ kept = _without(settings.to_dict(), apart | MACHINES_SETTINGS) => kept = None
_offsets: of each tensor only its middle is looked at
~ for at in ((start + stop) // 2, max(start, stop - SAMPLE_BYTES)) => for at in ((start + stop) // 2,)
_offsets: of each tensor only its end is looked at
~ at in ((start + stop) // 2, max(start, stop - SAMPLE_BYTES)) => at in (max(start, stop - SAMPLE_BYTES),)
> tests/connector/test_describe.py::test_weights_without_files_need_a_name
_weight_files: weights without files need no name
-     if kind in FILE_FORMATS:
+     if True:
+         return []
+     if kind in FILE_FORMATS:
> tests/connector/test_identity.py
stamps: an adapter that is loaded in place is read again only if its files have changed their size
~ (str(file), state.st_mtime_ns, state.st_size) => (str(file), 0, state.st_size)
_contents: a picture counts by vLLM's identifier
~ if not tensors or any(tensor.device.type != "cpu" for tensor in tensors): => if True:
_tensor_digest: embeddings are copied before they are hashed
~ tensor.detach() => tensor.detach().clone()
> tests/connector/test_describe.py::test_what_vllm_makes_of_the_files_counts
_fingerprint: quantization while the weights are loaded does not count
~ {model.quantization} {getattr(model, => {getattr(model,
> tests/connector/test_describe.py::test_the_longest_context_counts_where_it_decides_what_k_is
_by_length: longrope counts only where all layers have it
~ ropes = [rope, *(each for each in rope.values() if isinstance(each, dict))] => ropes = [rope]
> tests/connector/test_describe.py::test_shards_that_have_changed_their_names_are_other_weights
_sample: the names of weight files do not count
~ f"{file.name}:{size}" => f"{size}"
== p2pkv/connector/vllm_patches.py > tests/connector/test_worker.py
EarlyRevocation.instead_of_update_requests: vLLM's V2 runner overwrites blocks before the revocation
~ self.preempt(each) => pass
> tests/connector/test_decode_side.py
PausedLoads.instead_of_reset_prefix_cache: a pause that keeps requests does not take back the blocks that KV has come into
~ if reset_running_requests: => if False:
> tests/connector/test_deferring_queue.py
Deferral.instead_of_add_request: beside another connector D asks that one only once
~ scheduler.connector, => getattr(scheduler.connector, "sub_connectors", [scheduler.connector])[-1],
> tests/connector/test_idle_steps.py
EngineCore._sleep_until_input: an engine core that shuts down rests
~  or not core.is_running() =>
> tests/connector/test_idle_steps.py::TestSpinning::test_a_wake_up_ends_the_nap
SpinWait.instead_of_wait: a nap sleeps through wake-ups
- original(condition, sleep_ms if timeout_ms is None else min(sleep_ms, timeout_ms))
+ time.sleep(sleep_ms / 1000)
> tests/connector/test_weights.py
_watching: weights that are loaded anew go unnoticed
~ if generation.changes > before and => if False and
== p2pkv/kv/small_copies.py > tests/kv/test_small_copies.py
Ring.__init__: block tables are uploaded from ordinary memory
~ pin_memory=True => pin_memory=False
Ring._enter: a ring is written again before its copies have been made
~ self._fences[segment % SEGMENTS].wait() => pass
Recent.find: a block table is uploaded again for each span of layers
~ if known is array and other == kind: => if False:
== p2pkv/links/gpu.py > tests/links/test_poll_timer.py
PollTimer.pause: a link is looked at late once an operation has waited for its peer
~ min(self._took, default=0.0) => max(self._took, default=0.0)
== p2pkv/links/nccl_ends.py > tests/links/test_nccl_queues.py
NcclEnd._launch: a link launches a second operation behind an unfinished one
~ self._on_device >= self._most => self._on_device > self._most
NcclEnd._next_group: D launches a receive that P has not announced
~ self._launchable[0] if self._launchable else 0 => len(self._queue)
NcclOutbound.due: P announces for several links what it may launch for one
~ self._busy.enter(self) => pass
NcclEnd.poll: a link rests before it has launched what it announced
~ self._due or self._launchable => self._launchable
NcclOutbound._group_at: more bytes are launched together than nccl_group_bytes has
~ if nbytes > self.shared.group_bytes: => if False:
== p2pkv/engine/from_prefill.py > tests/engine/test_nccl.py
InboundLink.sent: D launches each receive alone where P launches sends together
~ message.together or 1 => 1
> tests/engine/test_prefetch.py::test_admitted_requests_go_before_it
InboundLink.post: admitted requests wait behind what comes ahead
~ if not each.reserve), None) => if each.reserve < 0), None)
> tests/engine/test_cost.py
PrefillPeers._post: the first grant waits until all receives are posted
-                 effects.append(PostRemaining(peer))
-                 break
+                 pass
== p2pkv/links/nccl_communicator.py > tests/links/test_nccl_queues.py
NcclContext.alone: two links launch operations behind unfinished ones
~ not (self.busy.others(end) or self.busy_sends.others(end)) => True
NcclContext.obstructed: a link launches behind another's second operation
~ self.in_flight > 1 and => False and
NcclContext.carry_both_ways: ranks of both roles launch ahead
~ self.in_flight = 1 => pass
== p2pkv/kv/kernels.cu > tests/kv/test_nvrtc.py
: what a thread of a kernel loads goes through local memory
~ = some[i]; => = some[(i + rows) % P2PKV_TOGETHER];
== p2pkv/device.py > tests/unit/test_device.py
take_memory: a device that is full is not named
~ except (torch.OutOfMemoryError, MemoryError): => except NotImplementedError:
> tests/engine/test_ends_on_device.py
own_stream: a stream is given back with copies on it, and their memory freed
~ CudaEvent(index, stream).wait() => CudaEvent(index, stream).ready()
take_stream: each rank and link makes a stream, and none is used again
~ return _idle_streams[device, first].popleft() => pass
== p2pkv/cli/link_check.py > tests/cli/test_doctor.py::test_other_bytes_than_were_sent_are_seen
_grant: the doctors believe whatever comes over the link
~ if compare and not torch.equal => if False and not torch.equal
== p2pkv/connector/circular_buffers.py
> tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block
_group: only the first head of a ring travels
~ torch.split(ring.tensor, 1, 1) => torch.split(ring.tensor, 1, 1)[:1]
== p2pkv/connector/attention_rows.py
_planes: an indexer's keys and scales are taken to lie together
~ return INDEXER[spec.head_size] => return ()
== p2pkv/pairing.py > tests/unit/test_pairing.py
transfer_key: the tag of a pair is constant
~ return f"pair:{pair.unique}:{tag}/{prompt}" => return f"pair:{pair.unique}:0/{prompt}"
== p2pkv/connector/idle_steps.py > tests/connector/test_idle_steps.py
IdleBackoff.step: a step waits while an earlier one with tokens is out
~ if self._empty < self._batches or not awaited: => if not self._empty or not awaited:
IdleBackoff.step: a bell ends a rest, and the step that may bring its news is forgotten
~ 0 if tokens else 1 if woken else => 0 if tokens else
: naps wait for a wake-up that can be lost
~ MAX_SLEEP_MS = 4 => MAX_SLEEP_MS = 60_000
== p2pkv/control/endpoint.py > tests/control/test_endpoint.py
Connection.send: a message overtakes those that are held
- return self._hand_over([data])
+ held, self._held = self._held, []; sent = self._hand_over([data]); self._held = held; return sent
Connection._hand_over: messages that were held are not sent
~ self._held + more, [] => more, []
Endpoint._socket: control sockets have no keepalive
~ socket.setsockopt(zmq.TCP_KEEPALIVE, 1) => socket.setsockopt(zmq.TCP_KEEPALIVE, 0)
Endpoint._socket: the kernel probes control sockets only after its own two hours
~         socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60) =>
== proxy/attempt.py > tests/proxy/test_process.py::test_a_p_that_ends_after_d_leaves_nothing_of_its_request
Attempt._finish_later: the timer for a P that ends late is not cancelled
~ deadline.cancel() => None
> tests/proxy/test_bodies.py::test_streams_that_have_begun_take_no_room_for_bodies
Attempt._pass_on: a body is held while its answer is streamed
~ self.body.let_go()  # from here on nothing is tried again => pass
> tests/proxy/test_blame.py::test_a_p_with_another_key_fails_no_request_and_gets_a_pause
Attempt._charge_doubted: a P that D has proved wrong is not charged
~             if charge is proof: =>             if False:
> tests/proxy/test_blame.py::test_a_p_that_is_not_needed_any_more_breaks_no_stream
Attempt._interrupt: a P that stops breaks a stream of several prompts
~  and ended.verdict.again is not RetryKind.GOES_ON: => :
> tests/proxy/test_instances.py::test_a_p_counts_as_drained_when_d_has_its_kv_and_not_before
Attempt.needs: the P of several prompts counts as not needed after the first token
~  and not (begun and self.body.one_prompt) =>  and not begun
> tests/proxy/test_blame.py::test_ds_error_waits_for_the_news_of_ps_failure_and_is_ps
Attempt._concurrent: D's error does not wait for the news of P's failure
~                     await asyncio.wait((self._rest or prefilling,), timeout=_VERDICT_SECONDS) =>                     pass
> tests/proxy/test_blame.py::test_who_has_said_goodbye_is_not_judged
Attempt._count: instances that have said goodbye are judged
~ if instance.left is not None: => if False:
> tests/proxy/test_first_token.py
Attempt._concurrent: a D that goes on behind P's token waits for P's KV once more
~ self.request_id, self._prefilling = self.unique, None => self._prefilling = None
Attempt._concurrent: a D that is lost after it has drawn another first token takes the client's stream with it
~ self.relay, self.doubted = self._handed_on, () => self.doubted = ()
== proxy/upstream.py > tests/proxy/test_continuation.py::test_a_d_that_has_sent_all_is_no_loss
Call.lose: an answer that has come whole is thrown away when its instance is lost
~ if self._response is not None and self._response.content.is_eof(): => if False:
> tests/proxy/test_blame.py::test_no_token_in_time_is_a_504_or_another_d_s_answer
Call._in_time: the deadline for the first token is not kept
~ late = None if deadline is None else asyncio => late = None if True else asyncio
> tests/proxy/test_failures.py::test_an_answer_that_repeats_its_request_pauses_no_instance
gave_up: an answer was given up if the bytes that say so are anywhere in it
- return sign is not None and (sign is not _ABORT or _ABORT in body) and _given_up(body)
+ return b'"finish_reason":"abort"' in body
> tests/proxy/test_failures.py::test_what_does_not_give_up_passes_as_it_is
first_given_up: an event gives up if the bytes that say so are anywhere in it
~ if any(_given_up(line.removeprefix(_DATA)) for line in lines if line.startswith(_DATA)): => if lines:
> tests/proxy/test_vllm_answers.py::test_messages
_Answer.given_up: a message that was given up passes for a whole one
~ case "message", _: => case "no message", _:
> tests/proxy/test_bodies.py::test_a_large_body_is_sent_in_pieces_and_can_be_sent_again
: a large body is written in one go
~ _SENT_AT_ONCE = 1 << 17 => _SENT_AT_ONCE = 1 << 30
> tests/proxy/test_blame.py::test_what_has_begun_or_has_nowhere_to_go_stays
Call._stuck: what a hung D has begun is broken off
~             return False =>             return True
Call._stuck: a request at a hung D fails although there is no other
~ self.instance.vouches or self.may_leave() => True
> tests/proxy/test_upstream.py::test_only_a_connection_that_ends_at_once_was_closed_for_being_idle
Client.post: a request is sent again however late its connection has ended
~             at_once = time.monotonic() - began <= _REPEAT_SECONDS =>             at_once = True
> tests/proxy/test_upstream.py::test_what_is_sent_once_more_is_within_the_budget_of_retries
Client.post: requests are sent again beyond the budget of retries
~  and _closed_unanswered(error) and may_repeat()): =>  and _closed_unanswered(error)):
> tests/proxy/test_blame.py::test_what_the_proxy_lacks_is_no_instance_s_failure
Call._open: the proxy's own lack of sockets is an instance's failure
~             if is_ours(error): =>             if False:
== proxy/bodies.py > tests/proxy/test_bodies.py::test_no_item_of_a_list_becomes_an_object
parse: the values of a body become objects
- return Body(raw, fields, path, released)
+ read = msgspec.json.decode(raw)
+         return Body(raw, {k: Raw(msgspec.json.encode(v)) for k, v in read.items()}, path)
> tests/proxy/test_bodies.py::test_what_instances_get_is_made_of_the_clients_own_bytes
Body._with_fields: P's body is a copy of the client's
~ self._size > _SMALL_BODY and len(piece) > _SMALL_PIECE => False
> tests/proxy/test_bodies.py::test_two_million_empty_messages_end_at_the_proxy
BodyReader.read: the values of a body are not counted
~ await check_values(body, limits.max_values, token_ids=request.path in WITH_TOKEN_IDS) => pass
> tests/proxy/test_bodies.py::test_no_body_stays_in_memory_when_its_request_fails
Body.let_go: a body that no instance may be sent any more is held by what failed
~             content.pieces = () =>             pass
> tests/proxy/test_bodies.py::test_a_body_is_let_go_when_the_answer_has_begun
Prompt.let_go: a body that is let go still stands in memory
- empty afterwards."""
-         self._parts = []
+ empty afterwards."""
> tests/proxy/test_routing.py::test_a_picture_counts_by_a_figure_of_its_own
_is_data: a picture counts by the length of its base64
~ return mixed and len(look) == _LOOK_BYTES and not look.translate(None, _BASE64) => return False
== proxy/membership/instance.py
> tests/proxy/test_registry.py::test_a_p_is_chosen_among_those_that_fit_a_d_with_room
Instance.count_place: a D that is full is given more
~ self.full.add(self) => pass
> tests/proxy/test_blame.py::test_while_there_is_a_trial_what_becomes_of_others_decides_nothing
Breaker.succeeded: a success that is not the trial's ends a pause
~         if owner is None or owner is not self._trial: =>         if self._trial is None:
Breaker.failed: a failure that is not the trial's lengthens a pause
~             bad = owner is not None and owner is self._trial =>             bad = self._trial is not None
> tests/proxy/test_requests.py::test_an_error_names_no_instance_however_it_spells_the_address
Instance.__post_init__: an address that a ping spells in full is not taken out of errors
~ , str(self.zmq_address)} => }
== proxy/service.py > tests/proxy/test_bodies.py::test_messages_have_a_bound_of_their_own
Proxy.generate: messages have no bound of their own
~ if body.messages(self.limits.max_messages) > self.limits.max_messages: => if False:
> tests/proxy/test_blame.py::test_however_many_hang_there_the_budget_of_retries_keeps_none
Proxy._serve: the budget of retries keeps requests at a hung D
~  or outcome.end is CallEnd.HUNG =>
> tests/proxy/test_blame.py::test_what_is_sent_twice_and_fails_is_sent_anew_only_once
Proxy._serve: a request that was sent twice is sent anew without bound
~                 may_resend = False =>                 may_resend = True
> tests/proxy/test_failures.py::test_instances_whose_port_refuses_are_no_tries
Proxy._serve: an instance whose port refuses counts as a try
~ tries - outcome.uncounted => tries
== proxy/body_checks.py
> tests/proxy/test_bodies.py::test_texts_pictures_and_token_ids_are_no_values_however_long_they_are
check_values: others wait while the values of a body are counted
-             counted = True
-         await asyncio.sleep(0)
+             counted = True
== proxy/blame.py > tests/proxy/test_blame.py::test_a_p_with_another_key_fails_no_request_and_gets_a_pause
_of_p: a 4xx of P's is the client's mistake, whatever D says
~     if end in REFUSALS and decode in REFUSALS: =>     if end in REFUSALS:
> tests/proxy/test_blame.py::test_what_every_p_refuses_d_answers_and_no_p_is_blamed
_of_p: a client's request that no P can take has all P's paused
~         charge = Charge.IF_P_ACCEPTS =>         charge = Charge.IF_D_ACCEPTS
== proxy/membership/listed.py > tests/proxy/test_listed.py::test_a_rank_that_cannot_be_asked_is_asked_again
ListedWatch._look: a listed instance whose rank was known once is not asked again
~   self._source.answers = self._source.pinged = self._learnt =>   self._source.answers = self._source.pinged
> tests/proxy/test_listed.py::test_what_the_proxy_lacks_makes_no_listed_instance_unready
ListedWatch._look: the proxy's own lack of sockets makes a listed instance unready
~             if is_ours(error): =>             if False:
== proxy/models.py
> tests/proxy/test_endpoints.py::test_one_that_is_frozen_holds_up_nothing_and_its_models_are_known
ModelLists._replies_of: one frozen D holds up the list of models
~                     left = _OTHERS_SECONDS =>                     pass
ModelLists.merged: the models of a D that does not answer are forgotten
~             self._latest.update(found) =>             pass
== proxy/policies.py
> tests/proxy/test_routing.py::test_four_ranks_compute_all_of_it_sooner_than_one_computes_half
PrefixAware.__call__.cost: what is left of a prompt takes as long on any number of ranks
~ _WEIGHT_OF_NEW * new / instance.ping.tp_size => _WEIGHT_OF_NEW * new
== proxy/admission.py > tests/proxy/test_admission.py::test_what_a_second_try_needs_of_p
RequestPlace.mode_after: that a request was left to a D alone is forgotten at the next try
~         if self.choice.prefill_unavailable: =>         if False:
> tests/proxy/test_admission.py::test_the_place_that_is_left_for_a_d_alone_is_the_next_one_s
Admission.move: a place that is left for a D alone is not given to the next request
~         self.advance() =>         pass
> tests/proxy/test_membership.py::test_what_a_hung_engine_has_not_begun_goes_to_another_server
Admission._leave_culprit: a retry may go to the neighbour of the engine that failed
~ failed.union(culprit.neighbours()) => failed
> tests/proxy/test_continuation.py::test_all_streams_of_a_lost_d_go_on
Admission.resume: the budget of retries refuses the first resume
~ whatever=tries == 0 => whatever=False
> tests/proxy/test_continuation.py::test_a_stream_waits_for_room_at_another_d_before_newcomers
Admission.move_in_time: new requests get their places before streams that wait for one
~ next(self._numbers) - _BEFORE_ALL => next(self._numbers)
== proxy/transcript.py > tests/proxy/test_continuation.py::test_a_cut_answer_is_the_whole_one
Transcript.rewind: a stream goes on with a token too many
~ del self._ids[self._safe :] => del self._ids[self._safe + 3 :]
Transcript._note_text: text that a stop string may begin in counts as sent
~ self._chars + self.wanted.kept_back => self._chars
> tests/proxy/test_continuation.py::test_half_a_character_is_generated_anew
Transcript._note: half a character counts as sent
~  and not event.startswith(b'"', start + len(self._text)) =>
== proxy/continuation.py > tests/proxy/test_continuation.py::test_a_cut_answer_is_the_whole_one
Continuation._body: a stream that goes on may generate as many tokens as a new one
~ self._transcript.prompt_tokens) - self.before => self._transcript.prompt_tokens)
Continuation._passed: the client gets text again that it has
~  and not self._ids and not self._chars =>
> tests/proxy/test_first_token.py
RepeatedAnswer._passed: another first token of D's passes for P's
~ ids[: len(again)] != again or =>
RepeatedAnswer._passed: what D has generated with P's token is lost
~ if not part[name] and not choice["token_ids"] and finish is None: => if True:
RepeatedAnswer._passed: the client gets P's text once more
~ text[len(had) :], => text,
RepeatedAnswer._passed: the client gets the log-probabilities of P's token once more
~ len(again), 0) => 0, 0)
RepeatedAnswer.feed: the events of D say when D began
~ chunk.replace(*self._head) => chunk
== proxy/first_token.py
FirstTokens._repeats: a sampled answer begins with P's token and goes on with what D has drawn
~  and transcript.wanted.greedy =>
== p2pkv/kv/cache.py > tests/kv/test_refusals.py::test_the_bytes_of_a_prompt_are_those_of_all_planes_and_of_one_state
RankCache.nbytes: a state counts for each token, and every hook wakes the engine thread
~ 1 if each.block_size == 1 else tokens => tokens
== p2pkv/connector/deferring_queue.py > tests/connector/test_deferring_queue.py
DeferringQueue.prepend_requests: every scheduling pass comes to the requests that wait for P
~ if request.request_id in self._undecided: => if False:
DeferringQueue.resume: requests that P begins late come first, whatever their age
~ <= _age(request) => < 0
DeferringQueue.resume: a preempted request is overtaken by an older one
~ queue[0].status is RequestStatus.PREEMPTED or _age(queue[0]) => _age(queue[0])
DeferringQueue.__len__: requests that wait for P do not count as waiting
~  + len(self._deferred) =>
DeferringQueue.remove_requests: an aborted request that waits for P stays in the queue
~ self._deferred.pop(each.request_id, None) is None => each.request_id not in self._deferred
== p2pkv/connector/weights.py > tests/connector/test_weights_change.py
forget_prefixes: vLLM's prefix cache keeps what was computed with former weights
~ pool.evict_blocks(set(range(len(pool.blocks)))) => pass
forget_prefixes: what runs across a change of weights is found in vLLM's prefix cache
~ request.cache_salt = uuid.uuid4().hex => continue
== p2pkv/protocol/messages.py > tests/protocol/test_messages.py
_kept: fields that are not marked as optional are dropped too
~ name.startswith(OPTIONAL) => True
without_optional: an optional field may stand twice in a message, or in another form
~ if msgspec.msgpack.encode(fields) != data: => if False:
'''  # noqa: E501

FAULTS = r"""
== tests/support/connector/real_ranks.py
> tests/connector/test_poisoned_blocks.py::test_prompts_that_end_anywhere_in_a_block
Engine.prepare_blocks: blocks are not poisoned
~         self._poison(views, self._poisoned) =>
== tests/chaos/rough.py > tests/chaos/test_rough.py::test_short_stalls_cost_nothing_but_time
Relay._carry: a relay that should hold everything holds nothing
~ while way in manner.held: => while False:
> tests/chaos/test_rough.py::test_while_both_ways_are_held_nothing_comes_through
Relay._carry: connections that should be held are not, and the test of partitions asks for nothing
~ while way in manner.held: => while False:
== p2pkv/connector/recurrent.py > tests/connector/test_states.py::test_any_tensor_parallel_size_on_either_side
_delta_net: the window of a convolution is divided as one piece
- segments = ("q", keys), ("k", keys), ("v", values)
+ segments = (("q", _equal_parts(2 * keys.heads * keys.size + values.heads * values.size)),)
_mamba2: Mamba-2's copies of a group count as groups
~ sizes["norm.n_groups"] => sizes["n_groups"]
_parts: room for speculative tokens travels with the window
~ part = _StatePart(kind, name, form, axis, form.steps => part = _StatePart(kind, name, form, axis, form.room
> tests/connector/test_states.py::test_a_cpu_s_delta_net_meets_only_another_one
_parts: a CPU's delta net passes for a GPU's
~ codec = KEY_FIRST if on_cpu and kind == "GDN_ATTN" else DENSE => codec = DENSE
== p2pkv/kv/copiers.py > tests/connector/test_states.py::test_any_tensor_parallel_size_on_either_side
ColumnCopier._matrices: columns of a window that begins at another layer are copied as if they followed
~ np.flatnonzero(np.diff(steps) != self._element) => np.flatnonzero(np.diff(steps) > 1 << 40)
> tests/kv/test_cupy_launcher.py
DriverLauncher.launch: a kernel gets the arguments of the one before behind its own
~ packed.size.value = 8 * len(args) => packed.size.value = 8 * MAX_ARGUMENTS
PackedArguments: threads share the arguments of their launches
~ class PackedArguments(threading.local): => class PackedArguments:
== p2pkv/links/mps_check.py > tests/links/test_mps_check.py
turns: a rank warns although it cannot know whether MPS runs
~ or mps is not False => or mps
mps_runs: another process that has the daemon's old number passes for it
~ True if program(pid).startswith(DAEMON[:15]) else None => True if program(pid) else None
== p2pkv/links/nccl.py
> tests/links/test_nccl_memory.py
NcclLinks.__init__: P and D that divide messages in different ways pass for alike
~ {division(nccl.channels)}" => "
"""
