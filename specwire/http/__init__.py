"""An OpenAI-compatible HTTP front of a coordinator, and a page to look at: `specwire http`.

A process of its own, which speaks to the coordinator through the public SDK. Needs `specwire[http]`.

    origins.py   for which host, from which page
    reading.py   bodies of requests within limits; scan.py: those of their structure
    body.py      what a request may say           JSON → nouns
    choices.py   the generations of one request   n at once, as fast as the client reads
    answers.py   what a response says             nouns → JSON, in the forms of both APIs
    exchange.py  one request on the wire          JSON or SSE, ended when the client goes
    model.py     the model and its tokens; remembered.py: what is asked once
    app.py       routes                           server.py: the process, connections.py: its clients
"""
