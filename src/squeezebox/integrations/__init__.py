"""Squeezebox inside the training loops of others: Lightning, Hugging Face Trainer, accelerate.

In: options of :func:`squeezebox.attach`, given to a callback or a context. Out: a session that begins and
ends with the training, and whose state goes into the loop's own checkpoints and comes back.
May touch: session, and in each file the library that it is named after; importing the room loads none.
"""
