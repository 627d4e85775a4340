"""What replicas count, read over HTTP, and what a watch says of them as Prometheus metrics.

counters.py  one replica's /metrics as counts, and what was counted between two looks, restarts included
scrape.py    a look at several replicas at once; one that does not answer is told, and holds up no other
gauges.py    a watch's own metrics, as text and over HTTP
"""
