# One site on AWS: engines in a network of their own that dial the gateways, and the token they join with. One state for each site.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 7.0" }
  }
  backend "s3" {} # bucket, key, region and use_lockfile come from -backend-config
}

provider "aws" {
  region = var.site.region
  default_tags { tags = { project = "mico", site = var.site.name } }
}

resource "aws_secretsmanager_secret" "site" {
  name                    = "mico/site/${var.site.name}"
  description             = "What an engine reads at start: a JSON object from name to text"
  recovery_window_in_days = 7
}

resource "aws_secretsmanager_secret_version" "site" {
  secret_id                = aws_secretsmanager_secret.site.id
  secret_string_wo         = jsonencode(merge(var.secrets, { MICO_SITE_TOKEN = var.token }))
  secret_string_wo_version = var.token_version
}

module "machine" {
  source  = "../../modules/cloud-init"
  cloud   = "aws"
  secrets = [aws_secretsmanager_secret.site.arn]
  container = {
    image = var.image
    args  = ["site"]
    gpu   = true
    settings = merge({
      MICO_SITE_POOL     = var.site.name # every machine joins as the pool and its own host name
      MICO_SITE_CLOUD    = "aws"
      MICO_SITE_REGION   = var.site.region
      MICO_SITE_GATEWAYS = join(",", var.gateways)
      MICO_SITE_TLS      = "true"
      MICO_SITE_MODEL    = var.model
      MICO_SITE_DRAIN_S  = "22" # ends by itself before the container is killed
      HF_HOME            = "/var/lib/mico/models"
    }, var.settings)
  }
}

module "pool" {
  source    = "../../modules/pool-aws"
  pool      = merge(var.site, { role = "engine" })
  user_data = module.machine.user_data
  secrets   = [aws_secretsmanager_secret.site.arn]
}

output "pool" {
  description = "The site's pool."
  value       = module.pool.pool
}
