# A pool's resource group and network. Azure's own rules let the balancer's probes in and refuse the rest of the world; ports, if the
# pool serves any, are opened by one rule. A pool without ports is led out by a NAT gateway, and nothing leads in.

terraform {
  required_version = ">= 1.11"
  required_providers {
    azurerm = { source = "hashicorp/azurerm", version = "~> 4.55" }
  }
}

variable "name" {
  description = "Name of the pool."
  type        = string
}

variable "region" {
  description = "Location of the resource group and of all that is in it."
  type        = string
}

variable "cidr" {
  description = "Private range of the network."
  type        = string
}

variable "ports" {
  description = "TCP ports that the machines, which then have public addresses, serve."
  type        = list(number)
}

variable "ingress_cidrs" {
  description = "Addresses that may reach the ports."
  type        = list(string)
}

variable "tags" {
  description = "Tags of every resource."
  type        = map(string)
}

locals {
  private = length(var.ports) == 0
}

resource "azurerm_resource_group" "this" {
  name     = var.name
  location = var.region
  tags     = var.tags
}

resource "azurerm_virtual_network" "this" {
  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  address_space       = [var.cidr]
  tags                = var.tags
}

resource "azurerm_subnet" "this" {
  name                            = "machines"
  resource_group_name             = azurerm_resource_group.this.name
  virtual_network_name            = azurerm_virtual_network.this.name
  address_prefixes                = [var.cidr]
  default_outbound_access_enabled = false
}

resource "azurerm_network_security_group" "this" {
  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  tags                = var.tags
}

resource "azurerm_network_security_rule" "ports" {
  count                       = local.private ? 0 : 1
  name                        = "ports"
  resource_group_name         = azurerm_resource_group.this.name
  network_security_group_name = azurerm_network_security_group.this.name
  priority                    = 100
  direction                   = "Inbound"
  access                      = "Allow"
  protocol                    = "Tcp"
  source_port_range           = "*"
  source_address_prefixes     = var.ingress_cidrs
  destination_port_ranges     = [for port in var.ports : tostring(port)]
  destination_address_prefix  = "*"
}

resource "azurerm_subnet_network_security_group_association" "this" {
  subnet_id                 = azurerm_subnet.this.id
  network_security_group_id = azurerm_network_security_group.this.id
}

resource "azurerm_public_ip" "nat" {
  count               = local.private ? 1 : 0
  name                = "${var.name}-nat"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  allocation_method   = "Static"
  sku                 = "Standard"
  tags                = var.tags
}

resource "azurerm_nat_gateway" "this" {
  count               = local.private ? 1 : 0
  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  sku_name            = "Standard"
  tags                = var.tags
}

resource "azurerm_nat_gateway_public_ip_association" "this" {
  count                = local.private ? 1 : 0
  nat_gateway_id       = azurerm_nat_gateway.this[0].id
  public_ip_address_id = azurerm_public_ip.nat[0].id
}

resource "azurerm_subnet_nat_gateway_association" "this" {
  count          = local.private ? 1 : 0
  subnet_id      = azurerm_subnet.this.id
  nat_gateway_id = azurerm_nat_gateway.this[0].id
}

output "network" {
  description = "The network as pool modules report it: its id, the subnet that machines go into, no route tables."
  value = {
    id      = azurerm_virtual_network.this.id
    subnets = [azurerm_subnet.this.id]
    routes  = []
  }
  depends_on = [ # a machine that boots too early finds no way out, or an open way in
    azurerm_nat_gateway_public_ip_association.this,
    azurerm_subnet_nat_gateway_association.this,
    azurerm_subnet_network_security_group_association.this,
  ]
}

output "group" {
  description = "The resource group: its name and its location."
  value       = { name = azurerm_resource_group.this.name, location = azurerm_resource_group.this.location }
}
