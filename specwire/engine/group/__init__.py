"""One model over several processes: a driver that plans, and ranks that each hold a shard of the weights.

    driver (gRPC, loop, bookkeeping) ── batch, question ──▶ every rank: forward on its shard
                                     ◀───── answer ──────── rank 0: decide, where the logits are

The driver holds no shard. `placement` starts the ranks through Ray and detects when they die; steps use
connections of their own (`control`) and the model's collectives, never Ray. Except for the module that starts
Ray, nothing here is imported unless a group is configured.
"""
