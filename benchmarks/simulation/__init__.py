"""The running system in simulated time: the real services, on a clock that jumps from event to event.

Real are the coordinator (servicer, session, round loop, planners, trials, peers' streams, prepared
proposals), both model services' servicers, the lookahead with its forecast, and the engine with scheduler,
cost model and cache bookkeeping. Replaced are what takes time: the clock and the event loop
(`virtual_time`), gRPC and the network (`network`), and the engine's thread and device (`devices`).
"""
