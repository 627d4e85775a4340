"""Write served requests that policy allows to a traffic log: ``--middleware serving.tap.TrafficTap``.

Default deny: nothing is written unless the environment says what counts as consent. A misspelt variable, or a value
that says nothing clear, stops the start. Headers are those that only the gateway can set; all values of a repeated
header must agree. With a folder and without consent nothing is written, and what lies there is deleted in time.

    SLIPSTREAM_TAP_DIR               folder of the log; files are their owner's alone
    SLIPSTREAM_TAP_CONSENT           "allow_all", or rules of which one must hold:
                                     "header:x-consent=training; route:chat,responses; tenant:acme,globex"
    SLIPSTREAM_TAP_OPT_OUT           headers that say no, whatever else says yes: "x-no-training; x-retention=zero"
    SLIPSTREAM_TAP_ZERO_RETENTION    tenants that are never written: "initech,umbrella"
    SLIPSTREAM_TAP_TENANT_HEADER     trusted header that names the tenant
    SLIPSTREAM_TAP_SUBJECT_HEADER    trusted header that names the subject
    SLIPSTREAM_TAP_SLICE_HEADER      trusted header that names the slice
    SLIPSTREAM_TAP_WITHOUT_TENANT    a request that lacks that header: "deny" (default), or "write", without a tenant
    SLIPSTREAM_TAP_WITHOUT_SUBJECT   "deny" (default), or "one_request": a subject of its own for each
    SLIPSTREAM_TAP_RATE              share of the requests: "0.1", or by tenant: "0.1; acme=1; globex=0.02"
    SLIPSTREAM_TAP_ACCEPTED_FACTOR   1 (default); less writes fewer of the requests whose drafts were accepted: the
                                     rate's factor at all accepted, in a straight line from 1 at none
    SLIPSTREAM_TAP_TARGET            fingerprint id of the target that serves, as `slipstream status` prints it
    SLIPSTREAM_TAP_KEY               "ID:BASE64 of 32 bytes": seal the log (serving/tap/sealing.py); or
    SLIPSTREAM_TAP_KEY_FILE          a file of such keys, one a line; the first one seals
    SLIPSTREAM_TAP_TTL_HOURS         168 (default): the log's files are deleted when they are older
    SLIPSTREAM_TAP_FILE_MIB          64 (default): a file is committed when it is larger
    SLIPSTREAM_TAP_FILE_MINUTES      15 (default): or older
    SLIPSTREAM_TAP_MEMORY_MIB        256 (default): all that waits to be written, a server process

Clients get byte for byte what they would have got. On the event loop bodies are only referenced, and the exact ids of
prompt and reply are taken where the engine hands them out (serving/engine/exact_replies.py). A thread passes both to
a process of the tap's own, which parses, seals and writes (serving/tap/writer.py); if that is slow, stuck or dead,
what does not fit is dropped and counted. ``GET /slipstream/tap/metrics`` counts every request by what became of it.
The Rust front end (VLLM_USE_RUST_FRONTEND) has no middleware, and so no tap.
"""

from serving.tap.middleware import TrafficTap

__all__ = ["TrafficTap"]
