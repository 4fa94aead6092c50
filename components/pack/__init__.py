"""The component that packs one part of a shard set."""
