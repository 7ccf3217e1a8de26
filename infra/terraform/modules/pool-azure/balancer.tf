# The way in, for gateways only: an engine has no port, so nothing here is made for it. TLS ends in the gateway's own process.

resource "azurerm_public_ip" "this" {
  count               = local.gateway ? 1 : 0
  name                = var.pool.name
  resource_group_name = module.network.group.name
  location            = module.network.group.location
  allocation_method   = "Static"
  sku                 = "Standard"
  tags                = local.tags
}

resource "azurerm_lb" "this" {
  count               = local.gateway ? 1 : 0
  name                = var.pool.name
  resource_group_name = module.network.group.name
  location            = module.network.group.location
  sku                 = "Standard"
  frontend_ip_configuration {
    name                 = "main"
    public_ip_address_id = azurerm_public_ip.this[0].id
  }
  tags = local.tags
}

resource "azurerm_lb_backend_address_pool" "this" {
  count           = local.gateway ? 1 : 0
  name            = "machines"
  loadbalancer_id = azurerm_lb.this[0].id
}

resource "azurerm_lb_probe" "this" {
  count               = local.gateway ? 1 : 0
  name                = "health"
  loadbalancer_id     = azurerm_lb.this[0].id
  protocol            = "Https"
  port                = var.ports["api"]
  request_path        = "/health" # alive; whether any site can serve is not a reason to replace a gateway
  interval_in_seconds = 10
  number_of_probes    = 2
}

resource "azurerm_lb_rule" "this" {
  for_each                       = var.ports
  name                           = each.key
  loadbalancer_id                = azurerm_lb.this[0].id
  protocol                       = "Tcp"
  frontend_port                  = each.value
  backend_port                   = each.value
  frontend_ip_configuration_name = "main"
  backend_address_pool_ids       = [azurerm_lb_backend_address_pool.this[0].id]
  probe_id                       = azurerm_lb_probe.this[0].id
  idle_timeout_in_minutes        = 30 # a site's link may be quiet
  tcp_reset_enabled              = true
}
