provider "google" {
  project = "p"
}

variables {
  user_data = "#cloud-config\n"
  secrets   = ["mico-site-gcp-eu"]
  tags      = { project = "mico" }
}

run "engine" {
  variables {
    pool = {
      name          = "gcp-eu", role = "engine", region = "europe-west4", min = 2, max = 4, spot = true
      machine_types = ["g2-standard-8", "g2-standard-12"], gpu = { type = "nvidia-l4", count = 1 }, disk_gb = 150
    }
  }
  assert {
    condition     = sort(keys(output.pool)) == tolist(["cloud", "endpoint", "group", "identity", "name", "network", "region", "role"])
    error_message = "the output has the shape that all pools share"
  }
  assert {
    condition = alltrue([
      output.pool.endpoint == null, length(google_compute_firewall.ports) == 0, length(google_compute_forwarding_rule.this) == 0,
      length(google_compute_address.this) == 0, length(google_compute_region_backend_service.this) == 0,
      length(google_compute_region_health_check.this) == 0,
    ])
    error_message = "an engine has no way in"
  }
  assert {
    condition = alltrue([
      google_secret_manager_secret_iam_member.read["mico-site-gcp-eu"].secret_id == "mico-site-gcp-eu",
      google_secret_manager_secret_iam_member.read["mico-site-gcp-eu"].role == "roles/secretmanager.secretAccessor",
      google_secret_manager_secret_iam_member.read["mico-site-gcp-eu"].member == google_service_account.this.member,
      length(google_secret_manager_secret_iam_member.read) == 1,
      google_service_account.this.account_id == "pool-gcp-eu", google_service_account.this.display_name == "Pool gcp-eu",
    ])
    error_message = "the machines may read their own secrets and nothing else"
  }
  assert {
    condition = alltrue([
      google_compute_region_instance_template.this.machine_type == "g2-standard-8",
      google_compute_region_instance_template.this.region == "europe-west4",
      google_compute_region_instance_template.this.labels == tomap({ project = "mico", role = "engine" }),
      google_compute_region_instance_template.this.metadata == tomap({ user-data = var.user_data, block-project-ssh-keys = "true", enable-oslogin = "TRUE" }),
      google_compute_region_instance_template.this.disk[0].source_image == "projects/deeplearning-platform-release/global/images/family/common-cu128-ubuntu-2204-nvidia-570",
      google_compute_region_instance_template.this.disk[0].boot, google_compute_region_instance_template.this.disk[0].auto_delete,
      google_compute_region_instance_template.this.disk[0].disk_type == "pd-balanced",
      google_compute_region_instance_template.this.disk[0].disk_size_gb == 150,
      length(google_compute_region_instance_template.this.guest_accelerator) == 0,
      google_compute_region_instance_template.this.name_prefix == "gcp-eu-",
    ])
    error_message = "the machine: type, image, first boot, one disk of the asked size that goes with it"
  }
  assert {
    condition = alltrue([
      length(google_compute_region_instance_template.this.network_interface[0].access_config) == 0,
      google_compute_region_instance_template.this.network_interface[0].subnetwork == output.pool.network.subnets[0],
    ])
    error_message = "an engine has no public address"
  }
  assert {
    condition = alltrue([
      google_compute_region_instance_template.this.scheduling[0].provisioning_model == "SPOT",
      google_compute_region_instance_template.this.scheduling[0].preemptible,
      !google_compute_region_instance_template.this.scheduling[0].automatic_restart,
      google_compute_region_instance_template.this.scheduling[0].on_host_maintenance == "TERMINATE",
      google_compute_region_instance_template.this.scheduling[0].instance_termination_action == "STOP",
    ])
    error_message = "a spot pool buys spot machines"
  }
  assert {
    condition = alltrue([
      google_compute_region_instance_template.this.service_account[0].email == google_service_account.this.email,
      google_compute_region_instance_template.this.service_account[0].scopes == toset(["cloud-platform"]),
      !google_compute_region_instance_template.this.shielded_instance_config[0].enable_secure_boot,
      google_compute_region_instance_template.this.shielded_instance_config[0].enable_vtpm,
      google_compute_region_instance_template.this.shielded_instance_config[0].enable_integrity_monitoring,
    ])
    error_message = "the machine's identity and its shield"
  }
  assert {
    condition = alltrue([
      google_compute_region_instance_group_manager.this.name == "gcp-eu",
      google_compute_region_instance_group_manager.this.region == "europe-west4",
      google_compute_region_instance_group_manager.this.base_instance_name == "gcp-eu",
      google_compute_region_instance_group_manager.this.target_size == 2,
      google_compute_region_instance_group_manager.this.distribution_policy_target_shape == "ANY",
      !google_compute_region_instance_group_manager.this.wait_for_instances,
      google_compute_region_instance_group_manager.this.version[0].instance_template == google_compute_region_instance_template.this.id,
      length(google_compute_region_instance_group_manager.this.auto_healing_policies) == 0,
      one(google_compute_region_instance_group_manager.this.instance_flexibility_policy[0].instance_selections).machine_types == toset(["g2-standard-8", "g2-standard-12"]),
      one(google_compute_region_instance_group_manager.this.instance_flexibility_policy[0].instance_selections).name == "in-order",
    ])
    error_message = "the group: wherever there are GPUs of the types asked for, no wait for them"
  }
  assert {
    condition = alltrue([
      google_compute_region_instance_group_manager.this.update_policy[0].type == "PROACTIVE",
      google_compute_region_instance_group_manager.this.update_policy[0].minimal_action == "REPLACE",
      google_compute_region_instance_group_manager.this.update_policy[0].instance_redistribution_type == "NONE",
      google_compute_region_instance_group_manager.this.update_policy[0].max_surge_fixed == 0,
      google_compute_region_instance_group_manager.this.update_policy[0].max_unavailable_fixed == 3,
    ])
    error_message = "a new version replaces machines in place"
  }
}

run "engine_on_demand_with_a_gpu_apart" {
  command = plan
  variables {
    pool = {
      name          = "gcp-t4", role = "engine", region = "europe-west4", min = 0, max = 1
      machine_types = ["n1-standard-8"], gpu = { type = "nvidia-tesla-t4", count = 2 }
    }
  }
  assert {
    condition = alltrue([
      google_compute_region_instance_template.this.guest_accelerator[0].type == "nvidia-tesla-t4",
      google_compute_region_instance_template.this.guest_accelerator[0].count == 2,
      google_compute_region_instance_template.this.scheduling[0].provisioning_model == "STANDARD",
      google_compute_region_instance_template.this.scheduling[0].automatic_restart,
      length(google_compute_region_instance_group_manager.this.instance_flexibility_policy) == 0,
    ])
    error_message = "an N1 machine is given its GPUs"
  }
}

run "gateway" {
  variables {
    pool          = { name = "gw-g", role = "gateway", region = "europe-west4", machine_types = ["n2-standard-4"], min = 1, max = 1 }
    ports         = { api = 443, sites = 8443 }
    ingress_cidrs = ["192.0.2.0/24"]
  }
  assert {
    condition = alltrue([
      google_compute_region_instance_template.this.disk[0].source_image == "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
      google_compute_region_instance_template.this.network_interface[0].access_config[0].network_tier == "PREMIUM",
      google_compute_region_instance_template.this.scheduling[0].on_host_maintenance == "MIGRATE",
      google_compute_region_instance_template.this.shielded_instance_config[0].enable_secure_boot,
      google_compute_region_instance_group_manager.this.distribution_policy_target_shape == "EVEN",
      google_compute_region_instance_group_manager.this.auto_healing_policies[0].health_check == google_compute_region_health_check.this[0].id,
      google_compute_region_instance_group_manager.this.auto_healing_policies[0].initial_delay_sec == 180,
    ])
    error_message = "a gateway: no GPU driver, an address, replaced when it does not answer"
  }
  assert {
    condition = alltrue([
      google_compute_firewall.ports[0].name == "gw-g", google_compute_firewall.ports[0].direction == "INGRESS",
      google_compute_firewall.ports[0].network == output.pool.network.id,
      google_compute_firewall.ports[0].source_ranges == toset(["192.0.2.0/24", "35.191.0.0/16", "130.211.0.0/22", "209.85.152.0/22", "209.85.204.0/22"]),
      google_compute_firewall.ports[0].target_service_accounts == toset([google_service_account.this.email]),
      one(google_compute_firewall.ports[0].allow).protocol == "tcp", one(google_compute_firewall.ports[0].allow).ports == tolist(["443", "8443"]),
    ])
    error_message = "the served ports are open to whom they should be, and nothing else"
  }
  assert {
    condition = alltrue([
      google_compute_region_health_check.this[0].name == "gw-g", google_compute_region_health_check.this[0].region == "europe-west4",
      google_compute_region_health_check.this[0].check_interval_sec == 10,
      google_compute_region_health_check.this[0].healthy_threshold == 2, google_compute_region_health_check.this[0].unhealthy_threshold == 2,
      google_compute_region_health_check.this[0].https_health_check[0].port == 443,
      google_compute_region_health_check.this[0].https_health_check[0].request_path == "/health",
    ])
    error_message = "health is asked at the API"
  }
  assert {
    condition = alltrue([
      google_compute_region_backend_service.this[0].name == "gw-g", google_compute_region_backend_service.this[0].region == "europe-west4",
      google_compute_region_backend_service.this[0].protocol == "TCP",
      google_compute_region_backend_service.this[0].load_balancing_scheme == "EXTERNAL",
      google_compute_region_backend_service.this[0].connection_draining_timeout_sec == 300,
      google_compute_region_backend_service.this[0].health_checks == toset([google_compute_region_health_check.this[0].id]),
      one(google_compute_region_backend_service.this[0].backend).group == google_compute_region_instance_group_manager.this.instance_group,
      one(google_compute_region_backend_service.this[0].backend).balancing_mode == "CONNECTION",
      google_compute_forwarding_rule.this[0].name == "gw-g", google_compute_forwarding_rule.this[0].region == "europe-west4",
      google_compute_forwarding_rule.this[0].ip_protocol == "TCP",
      google_compute_forwarding_rule.this[0].ip_address == google_compute_address.this[0].address,
      google_compute_forwarding_rule.this[0].ports == toset(["443", "8443"]),
      google_compute_forwarding_rule.this[0].load_balancing_scheme == "EXTERNAL",
      google_compute_forwarding_rule.this[0].backend_service == google_compute_region_backend_service.this[0].id,
      google_compute_forwarding_rule.this[0].labels == tomap({ project = "mico", role = "gateway" }),
      google_compute_address.this[0].name == "gw-g", google_compute_address.this[0].region == "europe-west4",
      output.pool.endpoint == google_compute_address.this[0].address,
    ])
    error_message = "each port is passed through unchanged from one address"
  }
}
