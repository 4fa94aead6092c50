"""XLA options for tests on CPUs, which would otherwise spend most of their time in the compiler."""

QUICK_XLA = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
