"""What Prometheus makes of our metrics: recording rules, alerts, and their renderings. The one source of all of them."""
