"""The command line: arguments in, calls to session and reports, tables and files out.

In: ``sys.argv`` and, for the data set, ``SQUEEZEBOX_DATA``. Out: text, JSON and an exit status.
May touch: everything below it; the only room that prints and reads environment variables.
"""
