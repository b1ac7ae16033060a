"""Computes parts of a model in ways that need less memory, and checks that they compute the same.

In: a model, a sample and its loss. Out: a rewritten model, and a table of what was rewritten.
May touch: the model's class while it is rewritten, and its gradients, buffers and random states, which come back.
"""
