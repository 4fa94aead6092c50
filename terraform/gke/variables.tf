variable "project" {
  description = "Project that everything is made in."
  type        = string
}

variable "zone" {
  description = "Zone of the cluster; it must offer the machines of the profiles, and the project needs quota there."
  type        = string
}

variable "name" {
  description = "Name of the cluster."
  type        = string
  default     = "podscale"
}

variable "profiles" {
  description = "Profiles of the chart to make node pools for, as profiles.yaml names them."
  type        = set(string)
  default     = ["cpu"]

  validation {
    condition     = length(setsubtract(var.profiles, ["cpu", "gpu-h100", "gpu-l4", "tpu-v5e", "tpu-v6e"])) == 0
    error_message = "There are the profiles cpu, gpu-h100, gpu-l4, tpu-v5e and tpu-v6e."
  }
}

variable "spot" {
  description = "Spot VMs; run documents then say launch.cluster.spot: true."
  type        = bool
  default     = false
}

variable "bucket" {
  description = "Bucket to make for the workspace of the TPU profiles, with accounts for it; empty makes none."
  type        = string
  default     = ""
}

variable "namespace" {
  description = "Namespace of the chart's release, whose accounts may act on the bucket."
  type        = string
  default     = "podscale"
}

variable "deletion_protection" {
  description = "Have `terraform destroy` refuse to delete the cluster."
  type        = bool
  default     = true
}
