"""Kubeflow pipelines and run presets, installed as podscale.pipelines."""
