"""The Kubeflow pipelines and the presets in runs/. Installed as podscale.pipelines."""
