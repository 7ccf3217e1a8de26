# What all sites share: gateways in two regions, their database with its replica, one name in DNS. A site has a root and a state of
# its own, so a cloud's outage never blocks another's apply.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 7.0" }
  }
  backend "s3" {} # bucket, key, region and use_lockfile come from -backend-config
}

provider "aws" {
  region = var.regions.a
  default_tags { tags = { project = "mico" } }
}

provider "aws" {
  alias  = "b"
  region = var.regions.b
  default_tags { tags = { project = "mico" } }
}

locals {
  cidrs     = { a = "10.30.0.0/20", b = "10.31.0.0/20" }
  addresses = [for name in ["a", "b"] : "${name}.gateway.${var.zone_name}:${local.ports.sites}"] # as module dns names them
  ports     = { api = 443, sites = 8443 }                                                        # served; TLS ends on the machine and leads to the process's own 8080 and 8081
  # A site keeps a link to every gateway and reaches each by its name, so a region's pool is one machine, replaced when it fails.
  pool = { role = "gateway", machine_types = var.machine_types, min = 1, max = 1 }
}

# ---- secrets: one for the gateways, copied to the other region, so that either region starts without the other

resource "aws_secretsmanager_secret" "gateway" {
  name                    = "mico/gateway"
  description             = "What a gateway reads at start: a JSON object from name to text"
  recovery_window_in_days = 7
  replica { region = var.regions.b }
}

resource "aws_secretsmanager_secret_version" "gateway" {
  secret_id = aws_secretsmanager_secret.gateway.id
  secret_string_wo = jsonencode({
    MICO_GATEWAY_DATABASE_URL = local.database_url
    MICO_DATABASE_URL         = local.database_url
    MICO_GATEWAY_SITE_TOKENS  = join(",", var.site_tokens)
    key-pepper                = var.key_pepper
    "tls.pem"                 = var.certificate
  })
  secret_string_wo_version = var.secrets_version
}

locals {
  database_url = "postgresql://mico:${urlencode(var.database_password)}@${module.postgres.addresses[var.active_database]}:5432/mico?sslmode=require"
  secret = {
    a = aws_secretsmanager_secret.gateway.arn
    b = replace(aws_secretsmanager_secret.gateway.arn, ":${var.regions.a}:", ":${var.regions.b}:")
  }
}

# ---- gateways

module "machine" {
  source   = "../../modules/cloud-init"
  for_each = local.secret
  cloud    = "aws"
  secrets  = [each.value]
  container = {
    image   = var.images[each.key]
    args    = ["gateway"]
    prepare = ["db", "upgrade"]
    files   = { "/var/lib/mico/key-pepper" = "key-pepper" } # the gateways share one, or a key made by one is unknown to the other
    settings = merge({
      MICO_GATEWAY_NAME    = "gateway-${each.key}"
      MICO_FOLDER          = "/var/lib/mico" # for commands given on the machine
      MICO_GATEWAY_FOLDER  = "/var/lib/mico"
      MICO_GATEWAY_PEERS   = join(",", local.addresses)
      MICO_GATEWAY_DRAIN_S = "22" # ends by itself before the container is killed
    }, var.settings)
  }
  tls = {
    api   = { port = local.ports.api, to = 8080, alpn = "http/1.1" }
    sites = { port = local.ports.sites, to = 8081, alpn = "h2" }
  }
}

module "gateway_a" {
  source        = "../../modules/pool-aws"
  pool          = merge(local.pool, { name = "gateway-a", region = var.regions.a })
  user_data     = module.machine["a"].user_data
  ports         = local.ports
  ingress_cidrs = ["0.0.0.0/0"]
  cidr          = local.cidrs.a
  secrets       = [local.secret.a]
}

module "gateway_b" {
  source        = "../../modules/pool-aws"
  providers     = { aws = aws.b }
  pool          = merge(local.pool, { name = "gateway-b", region = var.regions.b })
  user_data     = module.machine["b"].user_data
  ports         = local.ports
  ingress_cidrs = ["0.0.0.0/0"]
  cidr          = local.cidrs.b
  secrets       = [local.secret.b]
}

# ---- the database, and the private way to it from the other region

module "postgres" {
  source           = "../../modules/postgres-aws"
  providers        = { aws = aws, aws.standby = aws.b }
  name             = "mico"
  instance_class   = var.database_class
  primary          = { vpc = module.gateway_a.pool.network.id, subnets = module.gateway_a.pool.network.subnets }
  standby          = { vpc = module.gateway_b.pool.network.id, subnets = module.gateway_b.pool.network.subnets }
  client_cidrs     = values(local.cidrs)
  password         = var.database_password
  password_version = var.secrets_version
  protect          = var.protect
}

resource "aws_vpc_peering_connection" "ab" {
  vpc_id      = module.gateway_a.pool.network.id
  peer_vpc_id = module.gateway_b.pool.network.id
  peer_region = var.regions.b
  tags        = { Name = "mico-a-b" }
}

resource "aws_vpc_peering_connection_accepter" "ab" {
  provider                  = aws.b
  vpc_peering_connection_id = aws_vpc_peering_connection.ab.id
  auto_accept               = true
  tags                      = { Name = "mico-a-b" }
}

resource "aws_route" "a_to_b" {
  route_table_id            = module.gateway_a.pool.network.routes[0]
  destination_cidr_block    = local.cidrs.b
  vpc_peering_connection_id = aws_vpc_peering_connection_accepter.ab.vpc_peering_connection_id
}

resource "aws_route" "b_to_a" {
  provider                  = aws.b
  route_table_id            = module.gateway_b.pool.network.routes[0]
  destination_cidr_block    = local.cidrs.a
  vpc_peering_connection_id = aws_vpc_peering_connection_accepter.ab.vpc_peering_connection_id
}

# ---- the name

resource "aws_route53_zone" "this" {
  name = var.zone_name
}

module "dns" {
  source    = "../../modules/dns-aws"
  zone_id   = aws_route53_zone.this.zone_id
  zone_name = var.zone_name
  port      = local.ports.api
  gateways = {
    a = { endpoint = module.gateway_a.pool.endpoint, near = var.regions.a, serves = contains(var.serving, "a") }
    b = { endpoint = module.gateway_b.pool.endpoint, near = var.regions.b, serves = contains(var.serving, "b") }
  }
}
