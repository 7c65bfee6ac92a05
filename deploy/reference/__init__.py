"""`python -m deploy.reference`: writes the tables of docs/reference from what the code declares: settings, commands,
metrics, calls, fields of HTTP. A test fails while pages and code differ. What surrounds the tables is written by hand.
"""
