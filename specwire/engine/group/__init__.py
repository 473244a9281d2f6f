"""One model over several processes: a driver that decides, and ranks that hold a shard of the weights each.

    driver (gRPC, loop, books) ── batch, question ──▶ every rank: forward on its shard
                               ◀───── answer ──────── rank 0: decide, where the logits are

The driver is no rank of the model. `placement` starts the ranks through Ray and sees them die; the steps go
over connections of their own (`control`) and the model's collectives, never through Ray. But for what starts
Ray, nothing here is imported unless a group is asked for.
"""
