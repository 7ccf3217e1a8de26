provider "google" {
  project = "p"
}

variables {
  name   = "gcp-eu"
  region = "europe-west4"
  cidr   = "10.20.0.0/20"
}

run "private" {
  variables { public = false }
  assert {
    condition = alltrue([
      google_compute_network.this.name == "gcp-eu", !google_compute_network.this.auto_create_subnetworks,
      google_compute_subnetwork.this.name == "gcp-eu", google_compute_subnetwork.this.region == "europe-west4",
      google_compute_subnetwork.this.network == google_compute_network.this.id,
      google_compute_subnetwork.this.ip_cidr_range == "10.20.0.0/20", google_compute_subnetwork.this.private_ip_google_access,
      output.network.subnets == [google_compute_subnetwork.this.id],
    ])
    error_message = "one network with one subnetwork"
  }
  assert {
    condition = alltrue([
      google_compute_router.this[0].name == "gcp-eu", google_compute_router.this[0].region == "europe-west4",
      google_compute_router.this[0].network == google_compute_network.this.id,
      google_compute_router_nat.this[0].name == "gcp-eu", google_compute_router_nat.this[0].region == "europe-west4",
      google_compute_router_nat.this[0].router == google_compute_router.this[0].name,
      google_compute_router_nat.this[0].nat_ip_allocate_option == "AUTO_ONLY",
      google_compute_router_nat.this[0].source_subnetwork_ip_ranges_to_nat == "LIST_OF_SUBNETWORKS",
      one(google_compute_router_nat.this[0].subnetwork).name == google_compute_subnetwork.this.id,
      one(google_compute_router_nat.this[0].subnetwork).source_ip_ranges_to_nat == toset(["ALL_IP_RANGES"]),
    ])
    error_message = "the subnetwork leads out by Cloud NAT"
  }
}

run "public" {
  variables { public = true }
  assert {
    condition     = length(google_compute_router.this) == 0 && length(google_compute_router_nat.this) == 0
    error_message = "no NAT is paid for"
  }
}
