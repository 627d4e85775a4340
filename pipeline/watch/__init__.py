"""Live acceptance against what is expected and promised, drift in what is asked, and the alarms about both.

served.py     a record of the tap as counts, and a sketch of its words
logs.py       new records of logs that grow
reading.py    how far was read, and hours that are not over
hours.py      the sums of an hour: what everything else is told from
reference.py  what is expected of an hour, and how far it may lie off
learning.py   hours in which nothing changed → reference
arl.py        how rarely a CUSUM alarms falsely, and the threshold for that
accepted.py   shifts in what is accepted: CUSUMs by slice, learned levels, events
promise.py    what the gate measured, held against what is served
pays.py       whether speculation pays at the load there is
asked.py      drift in what is asked
alarms.py     what was found, since when, whether it still holds
state.py      all of it, folded hour by hour
view.py       the JSON that people, schedulers and metrics get
page.py       and its page
wording.py    times, in words
"""
