# One name for all gateways, which sends a client to the nearest region that says it is ready, and one name for each gateway, which
# the sites dial.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 7.0" }
  }
}

variable "zone_id" {
  description = "Hosted zone that holds the names."
  type        = string
}

variable "zone_name" {
  description = "Name of the zone: clients use api. below it, sites NAME.gateway. below it."
  type        = string
}

variable "port" {
  description = "HTTPS port of the API, which is asked for /ready."
  type        = number
}

variable "gateways" {
  description = "By name: the host name of the gateway's balancer, the AWS region nearest to it, and whether clients are sent to it now."
  type        = map(object({ endpoint = string, near = string, serves = optional(bool, true) }))
}

locals {
  names = { for name, _ in var.gateways : name => "${name}.gateway.${var.zone_name}" }
}

resource "aws_route53_record" "each" {
  for_each = var.gateways
  zone_id  = var.zone_id
  name     = local.names[each.key]
  type     = "CNAME"
  ttl      = 60
  records  = [each.value.endpoint]
}

resource "aws_route53_health_check" "this" {
  for_each          = var.gateways
  type              = "HTTPS"
  fqdn              = local.names[each.key]
  port              = var.port
  resource_path     = "/ready"
  enable_sni        = true
  request_interval  = 10
  failure_threshold = 2
  tags              = { Name = each.key }
}

resource "aws_route53_record" "api" {
  for_each        = { for name, gateway in var.gateways : name => gateway if gateway.serves }
  zone_id         = var.zone_id
  name            = "api.${var.zone_name}"
  type            = "CNAME"
  ttl             = 30
  records         = [each.value.endpoint]
  set_identifier  = each.key
  health_check_id = aws_route53_health_check.this[each.key].id
  latency_routing_policy { region = each.value.near }
}

output "url" {
  description = "Base URL for clients."
  value       = "https://api.${var.zone_name}${var.port == 443 ? "" : ":${var.port}"}/v1"
}

output "names" {
  description = "Host names of the gateways, for the sites."
  value       = values(local.names)
}

output "health_checks" {
  description = "By gateway: the id of its health check, for alarms."
  value       = { for name, check in aws_route53_health_check.this : name => check.id }
}
