"""Options of XLA for tests on CPUs: most of their time would be the compiler's."""

QUICK_XLA = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
