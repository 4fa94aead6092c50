"""A stage as a job on a Kubernetes cluster: submit, wait, follow its log, stop it, say what is wrong.

Only this package talks to an API server; pods that train never import it.
"""
