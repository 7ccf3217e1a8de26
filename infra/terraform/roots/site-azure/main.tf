# One site on Azure: engines in a network of their own that dial the gateways, and the token they join with. One state for each site.

terraform {
  required_version = ">= 1.11"
  required_providers {
    azurerm = { source = "hashicorp/azurerm", version = "~> 4.55" }
  }
  backend "azurerm" {} # resource group, storage account, container and key come from -backend-config
}

variable "subscription_id" {
  description = "Subscription that holds the site."
  type        = string
}

variable "ssh_public_key" {
  description = "Azure wants one for every Linux machine; no rule opens port 22."
  type        = string
}

provider "azurerm" {
  subscription_id = var.subscription_id
  features {}
}

data "azurerm_client_config" "current" {}

locals {
  cloud     = "azure"
  secret_id = azurerm_key_vault_secret.site.versionless_id

  tags  = { project = "mico", site = var.site.name }
  vault = "mico-${substr(sha256("${var.subscription_id}/${var.site.name}"), 0, 16)}" # unique in the whole of Azure
}

resource "azurerm_resource_group" "secrets" {
  name     = "${var.site.name}-secrets"
  location = var.site.region
  tags     = local.tags
}

resource "azurerm_key_vault" "site" {
  name                       = local.vault
  resource_group_name        = azurerm_resource_group.secrets.name
  location                   = azurerm_resource_group.secrets.location
  tenant_id                  = data.azurerm_client_config.current.tenant_id
  sku_name                   = "standard"
  rbac_authorization_enabled = true
  soft_delete_retention_days = 7
  tags                       = local.tags
}

resource "azurerm_role_assignment" "writer" { # whoever applies this writes the token
  scope                = azurerm_key_vault.site.id
  role_definition_name = "Key Vault Secrets Officer"
  principal_id         = data.azurerm_client_config.current.object_id
}

resource "azurerm_key_vault_secret" "site" {
  name             = "site"
  key_vault_id     = azurerm_key_vault.site.id
  content_type     = "application/json"
  value_wo         = local.secret
  value_wo_version = var.token_version
  depends_on       = [azurerm_role_assignment.writer]
}

module "pool" {
  source         = "../../modules/pool-azure"
  pool           = merge(var.site, { role = "engine" })
  user_data      = module.machine.user_data
  secrets        = [azurerm_key_vault_secret.site.resource_versionless_id]
  ssh_public_key = var.ssh_public_key
  tags           = local.tags
}
