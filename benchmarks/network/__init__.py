"""All-reduce and training steps over shaped links between network namespaces of one machine."""
