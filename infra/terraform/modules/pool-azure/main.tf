# A pool on Azure: a scale set, the identity of its machines, and for gateways (balancer.tf) a way in. A scale set has one machine
# type, so only the first of pool.machine_types is used.

terraform {
  required_version = ">= 1.11"
  required_providers {
    azurerm = { source = "hashicorp/azurerm", version = "~> 4.55" }
  }
}

variable "ssh_public_key" {
  description = "Azure wants one for every Linux machine; no rule opens port 22."
  type        = string
}

locals {
  gateway = var.pool.role == "gateway"
  image = {
    engine  = { publisher = "microsoft-dsvm", offer = "ubuntu-hpc", sku = "2204" }
    gateway = { publisher = "Canonical", offer = "ubuntu-24_04-lts", sku = "server" }
  }
  tags = merge(var.tags, { role = var.pool.role })
}

module "network" {
  source        = "../network-azure"
  name          = var.pool.name
  region        = var.pool.region
  cidr          = var.cidr
  ports         = values(var.ports)
  ingress_cidrs = var.ingress_cidrs
  tags          = local.tags
}

resource "azurerm_user_assigned_identity" "this" {
  name                = var.pool.name
  resource_group_name = module.network.group.name
  location            = module.network.group.location
  tags                = local.tags
}

resource "azurerm_role_assignment" "secrets" {
  count                = length(var.secrets)
  scope                = var.secrets[count.index]
  role_definition_name = "Key Vault Secrets User"
  principal_id         = azurerm_user_assigned_identity.this.principal_id
  principal_type       = "ServicePrincipal"
}

resource "azurerm_linux_virtual_machine_scale_set" "this" {
  name                            = var.pool.name
  resource_group_name             = module.network.group.name
  location                        = module.network.group.location
  sku                             = var.pool.machine_types[0]
  instances                       = var.pool.min
  priority                        = var.pool.spot ? "Spot" : "Regular"
  eviction_policy                 = var.pool.spot ? "Delete" : null
  max_bid_price                   = var.pool.spot ? -1 : null # never more than the price on demand
  admin_username                  = "mico"
  disable_password_authentication = true
  custom_data                     = base64encode(var.user_data)
  upgrade_mode                    = local.gateway ? "Rolling" : "Manual" # an engine has no probe to roll by
  health_probe_id                 = one(azurerm_lb_probe.this[*].id)
  overprovision                   = false
  admin_ssh_key {
    username   = "mico"
    public_key = var.ssh_public_key
  }
  source_image_reference {
    publisher = local.image[var.pool.role].publisher
    offer     = local.image[var.pool.role].offer
    sku       = local.image[var.pool.role].sku
    version   = "latest"
  }
  os_disk {
    caching              = "ReadWrite"
    storage_account_type = "Premium_LRS"
    disk_size_gb         = var.pool.disk_gb
  }
  network_interface {
    name    = "main"
    primary = true
    ip_configuration {
      name                                   = "main"
      primary                                = true
      subnet_id                              = module.network.network.subnets[0]
      load_balancer_backend_address_pool_ids = azurerm_lb_backend_address_pool.this[*].id
      dynamic "public_ip_address" { # so that sites can dial each gateway, not only the balancer
        for_each = local.gateway ? ["main"] : []
        content { name = public_ip_address.value }
      }
    }
  }
  identity {
    type         = "UserAssigned"
    identity_ids = [azurerm_user_assigned_identity.this.id]
  }
  termination_notification { # scheduled events tell the machine, which drains
    enabled = true
    timeout = "PT5M"
  }
  dynamic "spot_restore" {
    for_each = var.pool.spot ? ["PT1H"] : []
    content {
      enabled = true
      timeout = spot_restore.value
    }
  }
  dynamic "automatic_instance_repair" {
    for_each = local.gateway ? ["PT10M"] : []
    content {
      enabled      = true
      grace_period = automatic_instance_repair.value
    }
  }
  dynamic "rolling_upgrade_policy" {
    for_each = local.gateway ? ["PT5M"] : []
    content {
      max_batch_instance_percent              = 50
      max_unhealthy_instance_percent          = 100 # one machine is all of a small pool
      max_unhealthy_upgraded_instance_percent = 100
      pause_time_between_batches              = rolling_upgrade_policy.value
    }
  }
  tags       = local.tags
  depends_on = [azurerm_lb_rule.this, azurerm_role_assignment.secrets]
  lifecycle { ignore_changes = [instances] } # a scaler owns it
}

output "pool" {
  description = "The running pool, in the shape that all pool modules share."
  value = {
    name     = var.pool.name
    cloud    = "azure"
    region   = var.pool.region
    role     = var.pool.role
    endpoint = one(azurerm_public_ip.this[*].ip_address)
    identity = azurerm_user_assigned_identity.this.principal_id
    group    = azurerm_linux_virtual_machine_scale_set.this.name
    network  = module.network.network
  }
}
