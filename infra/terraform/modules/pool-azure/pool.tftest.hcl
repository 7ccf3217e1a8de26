provider "azurerm" {
  subscription_id = "00000000-0000-0000-0000-000000000000"
  features {}
}

variables {
  user_data      = "#cloud-config\n"
  secrets        = ["/subscriptions/s/resourceGroups/r/providers/Microsoft.KeyVault/vaults/v/secrets/site"]
  tags           = { project = "mico" }
  ssh_public_key = "ssh-ed25519 AAAA nobody"
}

run "engine" {
  variables {
    pool = {
      name          = "azure-eu", role = "engine", region = "westeurope", min = 1, max = 4, spot = true
      machine_types = ["Standard_NC24ads_A100_v4"], gpu = { type = "nvidia-a100", count = 1 }, disk_gb = 150
    }
  }
  assert {
    condition     = sort(keys(output.pool)) == tolist(["cloud", "endpoint", "group", "identity", "name", "network", "region", "role"])
    error_message = "the output has the shape that all pools share"
  }
  assert {
    condition = alltrue([
      output.pool.endpoint == null, length(azurerm_lb.this) == 0, length(azurerm_public_ip.this) == 0, length(azurerm_lb_rule.this) == 0,
      length(azurerm_lb_probe.this) == 0, length(azurerm_lb_backend_address_pool.this) == 0,
      length(azurerm_linux_virtual_machine_scale_set.this.network_interface[0].ip_configuration[0].public_ip_address) == 0,
    ])
    error_message = "an engine has no way in"
  }
  assert {
    condition = alltrue([
      length(azurerm_role_assignment.secrets) == 1,
      azurerm_role_assignment.secrets[0].scope == var.secrets[0],
      azurerm_role_assignment.secrets[0].role_definition_name == "Key Vault Secrets User",
      azurerm_role_assignment.secrets[0].principal_id == azurerm_user_assigned_identity.this.principal_id,
      azurerm_role_assignment.secrets[0].principal_type == "ServicePrincipal",
      azurerm_user_assigned_identity.this.name == "azure-eu", azurerm_user_assigned_identity.this.location == "westeurope",
      azurerm_user_assigned_identity.this.tags == tomap({ project = "mico", role = "engine" }),
      azurerm_linux_virtual_machine_scale_set.this.identity[0].type == "UserAssigned",
      azurerm_linux_virtual_machine_scale_set.this.identity[0].identity_ids == toset([azurerm_user_assigned_identity.this.id]),
    ])
    error_message = "the machines may read their own secrets and nothing else"
  }
  assert {
    condition = alltrue([
      azurerm_linux_virtual_machine_scale_set.this.name == "azure-eu",
      azurerm_linux_virtual_machine_scale_set.this.location == "westeurope",
      azurerm_linux_virtual_machine_scale_set.this.sku == "Standard_NC24ads_A100_v4",
      azurerm_linux_virtual_machine_scale_set.this.instances == 1,
      azurerm_linux_virtual_machine_scale_set.this.custom_data == base64encode(var.user_data),
      azurerm_linux_virtual_machine_scale_set.this.upgrade_mode == "Manual",
      azurerm_linux_virtual_machine_scale_set.this.overprovision == false,
      azurerm_linux_virtual_machine_scale_set.this.tags == tomap({ project = "mico", role = "engine" }),
    ])
    error_message = "the scale set: place, type, size, first boot"
  }
  assert {
    condition = alltrue([
      azurerm_linux_virtual_machine_scale_set.this.priority == "Spot",
      azurerm_linux_virtual_machine_scale_set.this.eviction_policy == "Delete",
      azurerm_linux_virtual_machine_scale_set.this.max_bid_price == -1,
      azurerm_linux_virtual_machine_scale_set.this.spot_restore[0].enabled,
      azurerm_linux_virtual_machine_scale_set.this.spot_restore[0].timeout == "PT1H",
      azurerm_linux_virtual_machine_scale_set.this.termination_notification[0].enabled,
      azurerm_linux_virtual_machine_scale_set.this.termination_notification[0].timeout == "PT5M",
      length(azurerm_linux_virtual_machine_scale_set.this.automatic_instance_repair) == 0,
      length(azurerm_linux_virtual_machine_scale_set.this.rolling_upgrade_policy) == 0,
    ])
    error_message = "a spot pool buys spot machines, which are told before they go"
  }
  assert {
    condition = alltrue([
      azurerm_linux_virtual_machine_scale_set.this.admin_username == "mico",
      azurerm_linux_virtual_machine_scale_set.this.disable_password_authentication == true,
      one(azurerm_linux_virtual_machine_scale_set.this.admin_ssh_key).username == "mico",
      one(azurerm_linux_virtual_machine_scale_set.this.admin_ssh_key).public_key == var.ssh_public_key,
      azurerm_linux_virtual_machine_scale_set.this.source_image_reference[0].publisher == "microsoft-dsvm",
      azurerm_linux_virtual_machine_scale_set.this.source_image_reference[0].offer == "ubuntu-hpc",
      azurerm_linux_virtual_machine_scale_set.this.source_image_reference[0].sku == "2204",
      azurerm_linux_virtual_machine_scale_set.this.source_image_reference[0].version == "latest",
      azurerm_linux_virtual_machine_scale_set.this.os_disk[0].caching == "ReadWrite",
      azurerm_linux_virtual_machine_scale_set.this.os_disk[0].storage_account_type == "Premium_LRS",
      azurerm_linux_virtual_machine_scale_set.this.os_disk[0].disk_size_gb == 150,
    ])
    error_message = "the machine: image and one disk of the asked size"
  }
  assert {
    condition = alltrue([
      azurerm_linux_virtual_machine_scale_set.this.network_interface[0].name == "main",
      azurerm_linux_virtual_machine_scale_set.this.network_interface[0].primary,
      azurerm_linux_virtual_machine_scale_set.this.network_interface[0].ip_configuration[0].name == "main",
      azurerm_linux_virtual_machine_scale_set.this.network_interface[0].ip_configuration[0].primary,
      azurerm_linux_virtual_machine_scale_set.this.network_interface[0].ip_configuration[0].subnet_id == output.pool.network.subnets[0],
    ])
    error_message = "the machine stands in the pool's network"
  }
}

run "gateway" {
  variables {
    pool          = { name = "gw-z", role = "gateway", region = "westeurope", machine_types = ["Standard_D4s_v5"], min = 1, max = 1 }
    ports         = { api = 443, sites = 8443 }
    ingress_cidrs = ["192.0.2.0/24"]
  }
  assert {
    condition = alltrue([
      azurerm_public_ip.this[0].name == "gw-z", azurerm_public_ip.this[0].location == "westeurope",
      azurerm_public_ip.this[0].allocation_method == "Static", azurerm_public_ip.this[0].sku == "Standard",
      azurerm_public_ip.this[0].tags["role"] == "gateway", output.pool.endpoint == azurerm_public_ip.this[0].ip_address,
      azurerm_lb.this[0].name == "gw-z", azurerm_lb.this[0].location == "westeurope", azurerm_lb.this[0].sku == "Standard",
      azurerm_lb.this[0].tags["role"] == "gateway", azurerm_lb.this[0].frontend_ip_configuration[0].name == "main",
      azurerm_lb.this[0].frontend_ip_configuration[0].public_ip_address_id == azurerm_public_ip.this[0].id,
      azurerm_lb_backend_address_pool.this[0].name == "machines", azurerm_lb_backend_address_pool.this[0].loadbalancer_id == azurerm_lb.this[0].id,
    ])
    error_message = "a balancer with one address"
  }
  assert {
    condition = alltrue([for name, port in var.ports : alltrue([
      azurerm_lb_rule.this[name].name == name, azurerm_lb_rule.this[name].loadbalancer_id == azurerm_lb.this[0].id,
      azurerm_lb_rule.this[name].protocol == "Tcp", azurerm_lb_rule.this[name].frontend_port == port,
      azurerm_lb_rule.this[name].backend_port == port, azurerm_lb_rule.this[name].frontend_ip_configuration_name == "main",
      azurerm_lb_rule.this[name].backend_address_pool_ids == tolist([azurerm_lb_backend_address_pool.this[0].id]),
      azurerm_lb_rule.this[name].probe_id == azurerm_lb_probe.this[0].id,
      azurerm_lb_rule.this[name].idle_timeout_in_minutes == 30, azurerm_lb_rule.this[name].tcp_reset_enabled,
    ])])
    error_message = "each port is passed through unchanged, and quiet links stay open"
  }
  assert {
    condition = alltrue([
      azurerm_lb_probe.this[0].name == "health", azurerm_lb_probe.this[0].loadbalancer_id == azurerm_lb.this[0].id,
      azurerm_lb_probe.this[0].protocol == "Https", azurerm_lb_probe.this[0].port == 443,
      azurerm_lb_probe.this[0].request_path == "/health", azurerm_lb_probe.this[0].interval_in_seconds == 10,
      azurerm_lb_probe.this[0].number_of_probes == 2,
    ])
    error_message = "health is asked at the API"
  }
  assert {
    condition = alltrue([
      azurerm_linux_virtual_machine_scale_set.this.priority == "Regular",
      azurerm_linux_virtual_machine_scale_set.this.upgrade_mode == "Rolling",
      azurerm_linux_virtual_machine_scale_set.this.health_probe_id == azurerm_lb_probe.this[0].id,
      azurerm_linux_virtual_machine_scale_set.this.source_image_reference[0].offer == "ubuntu-24_04-lts",
      azurerm_linux_virtual_machine_scale_set.this.network_interface[0].ip_configuration[0].public_ip_address[0].name == "main",
      azurerm_linux_virtual_machine_scale_set.this.network_interface[0].ip_configuration[0].load_balancer_backend_address_pool_ids == toset([azurerm_lb_backend_address_pool.this[0].id]),
      azurerm_linux_virtual_machine_scale_set.this.automatic_instance_repair[0].enabled,
      azurerm_linux_virtual_machine_scale_set.this.automatic_instance_repair[0].grace_period == "PT10M",
      azurerm_linux_virtual_machine_scale_set.this.rolling_upgrade_policy[0].max_batch_instance_percent == 50,
      azurerm_linux_virtual_machine_scale_set.this.rolling_upgrade_policy[0].max_unhealthy_instance_percent == 100,
      azurerm_linux_virtual_machine_scale_set.this.rolling_upgrade_policy[0].max_unhealthy_upgraded_instance_percent == 100,
      azurerm_linux_virtual_machine_scale_set.this.rolling_upgrade_policy[0].pause_time_between_batches == "PT5M",
      length(azurerm_linux_virtual_machine_scale_set.this.spot_restore) == 0,
    ])
    error_message = "gateways run on demand, are replaced when they do not answer, and one after the other"
  }
}
