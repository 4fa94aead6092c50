"""Jobs on a Kubernetes cluster: submit a stage, wait for it, show its log, stop it, and report problems.

Only this package sends requests to an API server; training pods never import it.
"""
