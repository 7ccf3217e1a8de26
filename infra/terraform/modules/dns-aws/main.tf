# One name for all gateways: clients are sent to the nearest region whose gateways say they are ready. Not Route 53's business where a
# gateway runs, so a gateway pool of any cloud may be listed.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 7.0" }
  }
}

variable "zone_id" {
  description = "Hosted zone that holds the name."
  type        = string
}

variable "host" {
  description = "The name that clients and sites use."
  type        = string
}

variable "port" {
  description = "HTTPS port of the API, which is asked for /ready."
  type        = number
}

variable "gateways" {
  description = "By pool: the address of its balancer, the type of its record (A for an address, CNAME for a name), and the AWS region nearest to it."
  type        = map(object({ endpoint = string, type = string, near = string }))
}

resource "aws_route53_health_check" "this" {
  for_each          = var.gateways
  type              = "HTTPS"
  fqdn              = each.value.type == "CNAME" ? each.value.endpoint : var.host
  ip_address        = each.value.type == "A" ? each.value.endpoint : null
  port              = var.port
  resource_path     = "/ready"
  enable_sni        = true
  request_interval  = 10
  failure_threshold = 2
  measure_latency   = true
  tags              = { Name = each.key }
}

resource "aws_route53_record" "this" {
  for_each        = var.gateways
  zone_id         = var.zone_id
  name            = var.host
  type            = each.value.type
  ttl             = 30
  records         = [each.value.endpoint]
  set_identifier  = each.key
  health_check_id = aws_route53_health_check.this[each.key].id
  latency_routing_policy { region = each.value.near }
}

output "health_checks" {
  description = "By pool: the health check, for alarms."
  value       = { for name, check in aws_route53_health_check.this : name => check.id }
}
