"""The report of the doctor: its data, and the same words in a terminal and on a page.

`data` has the places and totals, `phrases` the words for them; `table` prints them in a terminal and `page` as HTML.
`report` joins these into `Report`. `accounts` sums what is not shown place by place, `snippet` quotes the user's lines,
`timeline` draws the live bytes, `plain` is the table as text, and `log_report` the report on a log.
"""
