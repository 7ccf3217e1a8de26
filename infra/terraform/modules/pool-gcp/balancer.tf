# The way in, for gateways only: an engine has no port, so nothing here is made for it. TLS ends in the gateway's own process.

locals { # where Google asks from: for the group's healing the first two, for a balancer of this kind the first and the last two
  health_checks = ["35.191.0.0/16", "130.211.0.0/22", "209.85.152.0/22", "209.85.204.0/22"]
}

resource "google_compute_firewall" "ports" { # a passed-through connection keeps the caller's address
  count                   = local.gateway ? 1 : 0
  name                    = var.pool.name
  network                 = module.network.network.id
  direction               = "INGRESS"
  source_ranges           = concat(var.ingress_cidrs, local.health_checks)
  target_service_accounts = [google_service_account.this.email]
  allow {
    protocol = "tcp"
    ports    = [for port in values(var.ports) : tostring(port)]
  }
}

resource "google_compute_region_health_check" "this" {
  count               = local.gateway ? 1 : 0
  name                = var.pool.name
  region              = var.pool.region
  check_interval_sec  = 10
  healthy_threshold   = 2
  unhealthy_threshold = 2
  https_health_check {
    port         = var.ports["api"]
    request_path = "/health" # alive; whether any site can serve is not a reason to replace a gateway
  }
}

resource "google_compute_region_backend_service" "this" {
  count                           = local.gateway ? 1 : 0
  name                            = var.pool.name
  region                          = var.pool.region
  protocol                        = "TCP"
  load_balancing_scheme           = "EXTERNAL"
  health_checks                   = [google_compute_region_health_check.this[0].id]
  connection_draining_timeout_sec = 300 # streams under way may end before their machine goes
  backend {
    group          = google_compute_region_instance_group_manager.this.instance_group
    balancing_mode = "CONNECTION"
  }
}

resource "google_compute_address" "this" {
  count  = local.gateway ? 1 : 0
  name   = var.pool.name
  region = var.pool.region
}

resource "google_compute_forwarding_rule" "this" {
  count                 = local.gateway ? 1 : 0
  name                  = var.pool.name
  region                = var.pool.region
  ip_address            = google_compute_address.this[0].address
  ip_protocol           = "TCP"
  ports                 = [for port in values(var.ports) : tostring(port)]
  load_balancing_scheme = "EXTERNAL"
  backend_service       = google_compute_region_backend_service.this[0].id
  labels                = local.labels
}
