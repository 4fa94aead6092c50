output "credentials" {
  description = "Command that configures kubectl for the cluster."
  value       = "gcloud container clusters get-credentials ${google_container_cluster.this.name} --location=${var.zone}"
}

output "pools" {
  description = "Labels and taint of each profile's nodes, for the selectors and tolerations of pods."
  value       = { for name, pool in local.pools : name => { selector = pool.selector, taint = try(pool.taint, null) } }
}

output "google_service_accounts" {
  description = "Accounts for serviceAccounts.*.googleServiceAccount of the chart's values."
  value       = { for role, account in google_service_account.role : role => account.email }
}
