# A pool's own network in one region. Public: machines have addresses. Private: Cloud NAT leads out, nothing leads in.

terraform {
  required_version = ">= 1.11"
  required_providers {
    google = { source = "hashicorp/google", version = ">= 6.50, < 8.0" }
  }
}

variable "name" {
  description = "Name of the pool."
  type        = string
}

variable "region" {
  description = "Region of the subnetwork."
  type        = string
}

variable "cidr" {
  description = "Private range of the network."
  type        = string
}

variable "public" {
  description = "Whether the pool's machines have public addresses."
  type        = bool
}

resource "google_compute_network" "this" {
  name                    = var.name
  auto_create_subnetworks = false
}

resource "google_compute_subnetwork" "this" {
  name                     = var.name
  region                   = var.region
  network                  = google_compute_network.this.id
  ip_cidr_range            = var.cidr
  private_ip_google_access = true
}

resource "google_compute_router" "this" {
  count   = var.public ? 0 : 1
  name    = var.name
  region  = var.region
  network = google_compute_network.this.id
}

resource "google_compute_router_nat" "this" {
  count                              = var.public ? 0 : 1
  name                               = var.name
  region                             = var.region
  router                             = google_compute_router.this[0].name
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "LIST_OF_SUBNETWORKS"
  subnetwork {
    name                    = google_compute_subnetwork.this.id
    source_ip_ranges_to_nat = ["ALL_IP_RANGES"]
  }
}

output "network" {
  description = "The network as pool modules report it: its id, the subnetwork that machines go into, no route tables."
  value = {
    id      = google_compute_network.this.id
    subnets = [google_compute_subnetwork.this.id]
    routes  = []
  }
  depends_on = [google_compute_router_nat.this] # a machine that boots too early finds no way out
}
