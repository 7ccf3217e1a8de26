# A pool on Compute Engine: a regional instance group and the identity of its machines. For gateways, balancer.tf
# adds a way in.

terraform {
  required_version = ">= 1.11"
  required_providers {
    google = { source = "hashicorp/google", version = ">= 6.50, < 8.0" }
  }
}

locals {
  gateway = var.pool.role == "gateway"
  image = {
    engine  = "projects/deeplearning-platform-release/global/images/family/common-cu128-ubuntu-2204-nvidia-570"
    gateway = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
  }
  labels = merge(var.tags, { role = var.pool.role })
}

module "network" {
  source = "../network-gcp"
  name   = var.pool.name
  region = var.pool.region
  cidr   = var.cidr
  public = local.gateway
}

resource "google_service_account" "this" {
  account_id   = "pool-${var.pool.name}"
  display_name = "Pool ${var.pool.name}"
}

resource "google_secret_manager_secret_iam_member" "read" {
  for_each  = toset(var.secrets)
  secret_id = each.value
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.this.member
}

resource "google_compute_region_instance_template" "this" {
  name_prefix  = "${var.pool.name}-"
  region       = var.pool.region
  machine_type = var.pool.machine_types[0]
  labels       = local.labels
  metadata = {
    user-data              = var.user_data
    block-project-ssh-keys = "true"
    enable-oslogin         = "TRUE"
  }
  disk {
    source_image = local.image[var.pool.role]
    boot         = true
    auto_delete  = true
    disk_type    = "pd-balanced"
    disk_size_gb = var.pool.disk_gb
  }
  network_interface {
    subnetwork = module.network.network.subnets[0]
    dynamic "access_config" { # a public address, for gateways
      for_each = local.gateway ? ["PREMIUM"] : []
      content { network_tier = access_config.value }
    }
  }
  dynamic "guest_accelerator" { # only N1 machines take GPUs apart; G2, A2 and A3 bring their own
    for_each = var.pool.gpu != null && startswith(var.pool.machine_types[0], "n1-") ? [var.pool.gpu] : []
    content {
      type  = guest_accelerator.value.type
      count = guest_accelerator.value.count
    }
  }
  scheduling {
    provisioning_model          = var.pool.spot ? "SPOT" : "STANDARD"
    preemptible                 = var.pool.spot
    automatic_restart           = !var.pool.spot
    on_host_maintenance         = local.gateway ? "MIGRATE" : "TERMINATE" # a machine with GPUs cannot be moved
    instance_termination_action = var.pool.spot ? "STOP" : null
  }
  service_account {
    email  = google_service_account.this.email
    scopes = ["cloud-platform"] # the account's roles are the limit
  }
  shielded_instance_config {
    enable_secure_boot          = local.gateway # the GPU driver's modules are not signed for it
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }
  lifecycle { create_before_destroy = true }
}

resource "google_compute_region_instance_group_manager" "this" {
  name                             = var.pool.name
  region                           = var.pool.region
  base_instance_name               = var.pool.name
  target_size                      = var.pool.min
  distribution_policy_target_shape = local.gateway ? "EVEN" : "ANY" # GPUs: wherever there are any
  wait_for_instances               = false
  version { instance_template = google_compute_region_instance_template.this.id }
  dynamic "auto_healing_policies" { # an engine serves no port to ask; systemd restarts its process
    for_each = google_compute_region_health_check.this
    content {
      health_check      = auto_healing_policies.value.id
      initial_delay_sec = 180
    }
  }
  dynamic "instance_flexibility_policy" {
    for_each = length(var.pool.machine_types) > 1 && !local.gateway ? [var.pool.machine_types] : []
    content {
      instance_selections {
        name          = "in-order"
        machine_types = instance_flexibility_policy.value
      }
    }
  }
  update_policy { # a new version: machines go before their successors come, since GPUs are scarce
    type                         = "PROACTIVE"
    minimal_action               = "REPLACE"
    instance_redistribution_type = "NONE"
    max_surge_fixed              = 0
    max_unavailable_fixed        = 3 # the least that a group over three zones may have
  }
  lifecycle { ignore_changes = [target_size] } # a scaler owns it
}

output "pool" {
  description = "The running pool, in the shape that all pool modules share."
  value = {
    name     = var.pool.name
    cloud    = "gcp"
    region   = var.pool.region
    role     = var.pool.role
    endpoint = one(google_compute_address.this[*].address)
    identity = google_service_account.this.email
    group    = google_compute_region_instance_group_manager.this.name
    network  = module.network.network
  }
}
