provider "azurerm" {
  subscription_id = "00000000-0000-0000-0000-000000000000"
  features {}
}

variables {
  name   = "azure-eu"
  region = "westeurope"
  cidr   = "10.20.0.0/20"
  tags   = { project = "mico" }
}

run "private" {
  variables {
    ports         = []
    ingress_cidrs = []
  }
  assert {
    condition     = length(azurerm_network_security_rule.ports) == 0
    error_message = "no rule leads in"
  }
  assert {
    condition = alltrue([
      azurerm_nat_gateway.this[0].name == "azure-eu", azurerm_nat_gateway.this[0].sku_name == "Standard",
      azurerm_public_ip.nat[0].name == "azure-eu-nat", azurerm_public_ip.nat[0].allocation_method == "Static", azurerm_public_ip.nat[0].sku == "Standard",
      azurerm_nat_gateway_public_ip_association.this[0].nat_gateway_id == azurerm_nat_gateway.this[0].id,
      azurerm_nat_gateway_public_ip_association.this[0].public_ip_address_id == azurerm_public_ip.nat[0].id,
      azurerm_subnet_nat_gateway_association.this[0].subnet_id == azurerm_subnet.this.id,
      azurerm_subnet_nat_gateway_association.this[0].nat_gateway_id == azurerm_nat_gateway.this[0].id,
    ])
    error_message = "the subnet leads out by a NAT gateway"
  }
  assert {
    condition = alltrue([
      azurerm_subnet.this.name == "machines", azurerm_subnet.this.virtual_network_name == azurerm_virtual_network.this.name,
      azurerm_subnet.this.address_prefixes == tolist(["10.20.0.0/20"]), !azurerm_subnet.this.default_outbound_access_enabled,
      azurerm_virtual_network.this.name == "azure-eu", azurerm_virtual_network.this.address_space == toset(["10.20.0.0/20"]),
      azurerm_network_security_group.this.name == "azure-eu",
      azurerm_subnet_network_security_group_association.this.subnet_id == azurerm_subnet.this.id,
      azurerm_subnet_network_security_group_association.this.network_security_group_id == azurerm_network_security_group.this.id,
      output.network.subnets == [azurerm_subnet.this.id],
    ])
    error_message = "one network with one subnet, closed by one security group"
  }
  assert {
    condition = alltrue([for each in [
      azurerm_virtual_network.this, azurerm_network_security_group.this, azurerm_public_ip.nat[0], azurerm_nat_gateway.this[0],
    ] : each.location == "westeurope" && each.resource_group_name == "azure-eu" && each.tags == tomap({ project = "mico" })])
    error_message = "everything is in the pool's group and region"
  }
  assert {
    condition     = azurerm_resource_group.this.tags == tomap({ project = "mico" }) && output.group == { name = "azure-eu", location = "westeurope" }
    error_message = "the pool has a resource group of its own"
  }
}

run "public" {
  variables {
    ports         = [443, 8443]
    ingress_cidrs = ["192.0.2.0/24"]
  }
  assert {
    condition = alltrue([
      length(azurerm_nat_gateway.this) == 0, length(azurerm_public_ip.nat) == 0,
      length(azurerm_nat_gateway_public_ip_association.this) == 0, length(azurerm_subnet_nat_gateway_association.this) == 0,
    ])
    error_message = "no NAT gateway is paid for"
  }
  assert {
    condition = alltrue([
      azurerm_network_security_rule.ports[0].name == "ports", azurerm_network_security_rule.ports[0].resource_group_name == "azure-eu",
      azurerm_network_security_rule.ports[0].network_security_group_name == azurerm_network_security_group.this.name,
      azurerm_network_security_rule.ports[0].priority == 100, azurerm_network_security_rule.ports[0].direction == "Inbound",
      azurerm_network_security_rule.ports[0].access == "Allow", azurerm_network_security_rule.ports[0].protocol == "Tcp",
      azurerm_network_security_rule.ports[0].source_port_range == "*", azurerm_network_security_rule.ports[0].destination_address_prefix == "*",
      azurerm_network_security_rule.ports[0].source_address_prefixes == toset(["192.0.2.0/24"]),
      azurerm_network_security_rule.ports[0].destination_port_ranges == toset(["443", "8443"]),
    ])
    error_message = "the served ports are open to whom they should be, and nothing else"
  }
}
