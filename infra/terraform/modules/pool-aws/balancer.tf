# The way in, for gateways only: an engine has no port, so nothing here is made for it. TLS ends in the gateway's own process.

resource "aws_vpc_security_group_ingress_rule" "port" {
  for_each = { # the balancer keeps the caller's address; its own checks come from inside
    for pair in setproduct(keys(var.ports), concat(var.ingress_cidrs, [var.cidr])) : join(" ", pair) => pair
  }
  security_group_id = aws_security_group.this.id
  description       = each.value[0]
  cidr_ipv4         = each.value[1]
  from_port         = var.ports[each.value[0]]
  to_port           = var.ports[each.value[0]]
  ip_protocol       = "tcp"
}

resource "aws_lb" "this" {
  count                            = local.gateway ? 1 : 0
  name                             = var.pool.name
  load_balancer_type               = "network"
  subnets                          = module.network.network.subnets
  enable_cross_zone_load_balancing = true
  tags                             = local.tags
}

resource "aws_lb_target_group" "this" {
  for_each             = var.ports
  name                 = "${var.pool.name}-${each.key}"
  port                 = each.value
  protocol             = "TCP"
  vpc_id               = module.network.network.id
  deregistration_delay = 300 # streams under way may end before their machine goes
  health_check {
    protocol            = "HTTPS"
    port                = var.ports["api"]
    path                = "/health" # alive; whether any site can serve is not a reason to replace a gateway
    interval            = 10
    healthy_threshold   = 2
    unhealthy_threshold = 10 # a restart drains first: the machine, with its journal, must outlast it; DNS has checks of its own
  }
  tags = local.tags
}

resource "aws_lb_listener" "this" {
  for_each          = var.ports
  load_balancer_arn = aws_lb.this[0].arn
  port              = each.value
  protocol          = "TCP"
  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.this[each.key].arn
  }
}
