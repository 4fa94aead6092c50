# GKE cluster with node pools for Podscale. docs/how-to/gke.md creates the same with gcloud in its steps 1, 2 and 5.

terraform {
  required_version = ">= 1.5"
  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 5.16"
    }
  }
}

provider "google" {
  project = var.project
  zone    = var.zone
}

locals {
  pools = { for name, pool in yamldecode(file("${path.module}/profiles.yaml")) : name => pool if contains(var.profiles, name) }
  apis  = ["container.googleapis.com", "file.googleapis.com", "artifactregistry.googleapis.com"]
  roles = var.bucket == "" ? [] : ["launcher", "trainer"]
}

resource "google_project_service" "api" {
  for_each           = toset(local.apis)
  service            = each.value
  disable_on_destroy = false
}

resource "google_container_cluster" "this" {
  name                = var.name
  location            = var.zone
  initial_node_count  = 1
  deletion_protection = var.deletion_protection
  datapath_provider   = "ADVANCED_DATAPATH" # Dataplane V2, which enforces the chart's network policies

  release_channel {
    channel = "REGULAR"
  }

  # For controllers and launchers. Training has its own node pools.
  node_config {
    machine_type = "e2-standard-4"
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  workload_identity_config {
    workload_pool = "${var.project}.svc.id.goog"
  }

  monitoring_config {
    managed_prometheus {
      enabled = true
    }
  }

  addons_config {
    gcs_fuse_csi_driver_config {
      enabled = true
    }
    gcp_filestore_csi_driver_config {
      enabled = true
    }
  }

  depends_on = [google_project_service.api]
}

resource "google_container_node_pool" "profile" {
  for_each           = local.pools
  name               = each.value.pool
  cluster            = google_container_cluster.this.id
  location           = var.zone
  initial_node_count = each.value.min_nodes

  dynamic "autoscaling" {
    for_each = each.value.min_nodes < each.value.max_nodes ? [each.value] : []
    content {
      min_node_count = autoscaling.value.min_nodes
      max_node_count = autoscaling.value.max_nodes
    }
  }

  dynamic "placement_policy" {
    for_each = can(each.value.tpu_topology) ? [each.value.tpu_topology] : []
    content {
      type         = "COMPACT"
      tpu_topology = placement_policy.value
    }
  }

  # No taints here: GKE adds its own to nodes with GPUs and TPUs (see profiles.yaml).
  node_config {
    machine_type = each.value.machine_type
    spot         = var.spot

    workload_metadata_config {
      mode = "GKE_METADATA"
    }

    dynamic "gvnic" {
      for_each = try(each.value.gvnic, false) ? [true] : []
      content {
        enabled = gvnic.value
      }
    }

    dynamic "guest_accelerator" {
      for_each = can(each.value.accelerator) ? [each.value.accelerator] : []
      content {
        type  = guest_accelerator.value.type
        count = guest_accelerator.value.count
        gpu_driver_installation_config {
          gpu_driver_version = "LATEST"
        }
      }
    }
  }

  lifecycle {
    ignore_changes = [initial_node_count] # a change would recreate the pool
  }
}

resource "google_storage_bucket" "workspace" {
  count                       = var.bucket == "" ? 0 : 1
  name                        = var.bucket
  location                    = regex("^[a-z]+-[a-z]+[0-9]+", var.zone)
  uniform_bucket_level_access = true
}

resource "google_service_account" "role" {
  for_each   = toset(local.roles)
  account_id = "podscale-${each.value}"
}

resource "google_storage_bucket_iam_member" "role" {
  for_each = google_service_account.role
  bucket   = google_storage_bucket.workspace[0].name
  role     = "roles/storage.objectUser"
  member   = "serviceAccount:${each.value.email}"
}

resource "google_service_account_iam_member" "role" {
  for_each           = google_service_account.role
  service_account_id = each.value.name
  role               = "roles/iam.workloadIdentityUser"
  member             = "serviceAccount:${var.project}.svc.id.goog[${var.namespace}/podscale-${each.key}]"
  depends_on         = [google_container_cluster.this] # the cluster creates the workload pool
}
