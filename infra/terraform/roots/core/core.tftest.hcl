# Plans only: the real provider answers them too, with no account and nothing but a stand-in for the zones.

provider "aws" {
  region                      = "eu-central-1"
  access_key                  = "none"
  secret_key                  = "none"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
}

provider "aws" {
  alias                       = "b"
  region                      = "us-east-1"
  access_key                  = "none"
  secret_key                  = "none"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
}

override_data {
  target = module.gateway_a.module.network.data.aws_availability_zones.this
  values = { names = ["eu-central-1a", "eu-central-1b"] }
}

override_data {
  target = module.gateway_b.module.network.data.aws_availability_zones.this
  values = { names = ["us-east-1a", "us-east-1b"] }
}

variables {
  zone_name = "mico.example.com"
  images = {
    a = "example.com/gateway@sha256:0000000000000000000000000000000000000000000000000000000000000000"
    b = "example.com/gateway@sha256:1111111111111111111111111111111111111111111111111111111111111111"
  }
  site_tokens       = ["a-token-for-a-test"]
  key_pepper        = "0000000000000000000000000000000000000000000000000000000000000000"
  certificate       = "PEM"
  database_password = "long-enough-and-never-stored"
}

run "two_regions" {
  command = plan
  assert {
    condition     = output.url == "https://api.mico.example.com/v1"
    error_message = "clients need one URL"
  }
  assert {
    condition     = output.gateways == [for name in module.dns.names : "${name}:8443"] && length(output.gateways) == 2
    error_message = "sites dial every gateway, by the names that DNS has"
  }
  assert {
    condition     = one(aws_secretsmanager_secret.gateway.replica).region == "us-east-1" && aws_secretsmanager_secret_version.gateway.secret_string_wo == null
    error_message = "the secrets are in both regions, and in no plan"
  }
  assert {
    condition     = aws_route.a_to_b.destination_cidr_block == "10.31.0.0/20" && aws_route.b_to_a.destination_cidr_block == "10.30.0.0/20"
    error_message = "either region reaches the other's network"
  }
}

run "one_region_only" {
  command = plan
  variables { regions = { a = "eu-central-1", b = "eu-central-1" } }
  expect_failures = [var.regions]
}

run "nobody_serves" {
  command = plan
  variables { serving = [] }
  expect_failures = [var.serving]
}

run "a_short_password" {
  command = plan
  variables { database_password = "short" }
  expect_failures = [var.database_password]
}

run "a_password_that_rds_refuses" {
  command = plan
  variables { database_password = "long-enough/and-never-stored" }
  expect_failures = [var.database_password]
}

run "no_token_for_any_site" {
  command = plan
  variables { site_tokens = [] }
  expect_failures = [var.site_tokens]
}

run "two_tokens_in_one" {
  command = plan
  variables { site_tokens = ["a-token-for-a-test,a-token-for-b-test"] }
  expect_failures = [var.site_tokens]
}

run "an_empty_pepper" {
  command = plan
  variables { key_pepper = "" }
  expect_failures = [var.key_pepper]
}

run "a_zone_with_a_dot_at_its_end" {
  command = plan
  variables { zone_name = "mico.example.com." }
  expect_failures = [var.zone_name]
}
