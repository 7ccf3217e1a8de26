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

locals {
  cloud     = "aws"
  secret_id = aws_secretsmanager_secret.site.arn
}

resource "aws_secretsmanager_secret" "site" {
  name                    = "mico/site/${var.site.name}"
  description             = "What an engine reads at start: a JSON object from name to text"
  recovery_window_in_days = 7
}

resource "aws_secretsmanager_secret_version" "site" {
  secret_id                = aws_secretsmanager_secret.site.id
  secret_string_wo         = local.secret
  secret_string_wo_version = var.token_version
}

module "pool" {
  source    = "../../modules/pool-aws"
  pool      = merge(var.site, { role = "engine" })
  user_data = module.machine.user_data
  secrets   = [aws_secretsmanager_secret.site.arn]
}
