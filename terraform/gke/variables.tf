variable "project" {
  description = "Google Cloud project of all resources."
  type        = string
}

variable "zone" {
  description = "Zone of the cluster. It must offer the profiles' machine types, and the project needs quota for them there."
  type        = string
}

variable "name" {
  description = "Name of the cluster."
  type        = string
  default     = "podscale"
}

variable "profiles" {
  description = "Profiles of the chart, from profiles.yaml, for which node pools are created."
  type        = set(string)
  default     = ["cpu"]

  validation {
    condition     = length(setsubtract(var.profiles, ["cpu", "gpu-h100", "gpu-l4", "tpu-v5e", "tpu-v6e"])) == 0
    error_message = "Unknown profile. Choose from cpu, gpu-h100, gpu-l4, tpu-v5e and tpu-v6e."
  }
}

variable "spot" {
  description = "Use spot VMs. Run documents then need launch.cluster.spot: true."
  type        = bool
  default     = false
}

variable "bucket" {
  description = "Name of the bucket to create for the workspace of the TPU profiles, with its service accounts; empty creates none."
  type        = string
  default     = ""
}

variable "namespace" {
  description = "Namespace of the chart's release, whose service accounts may use the bucket."
  type        = string
  default     = "podscale"
}

variable "deletion_protection" {
  description = "Make `terraform destroy` refuse to delete the cluster."
  type        = bool
  default     = true
}
