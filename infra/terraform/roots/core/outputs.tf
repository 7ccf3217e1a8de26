output "url" {
  description = "Base URL for clients."
  value       = module.dns.url
}

output "gateways" {
  description = "Addresses for the `gateways` variable of a site."
  value       = local.addresses
}

output "name_servers" {
  description = "To be entered for the zone at the registrar of its parent domain."
  value       = aws_route53_zone.this.name_servers
}

output "pools" {
  description = "The gateway pools."
  value       = { a = module.gateway_a.pool, b = module.gateway_b.pool }
}

output "database" {
  description = "Host names of the database and of its replica."
  value       = module.postgres.addresses
}
