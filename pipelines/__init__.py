"""The Kubeflow pipelines and the presets in presets/. Installed as podscale.pipelines."""
