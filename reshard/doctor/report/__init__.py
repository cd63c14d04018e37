"""The report of the doctor: its data, and the same words in a terminal and on a page.

`data` has the places and totals, `phrases` the words for them; `table` prints them in a terminal and `page` as HTML.
`report` joins these into `Report`.
"""
