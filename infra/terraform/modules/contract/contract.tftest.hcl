# Each rule of the contract refuses what it should.

variables {
  pool      = { name = "aws-eu", role = "engine", region = "eu-central-1", machine_types = ["g6.xlarge"], min = 1, max = 4 }
  user_data = "#cloud-config\n"
}

run "a_plain_engine_pool_is_accepted" {
  command = plan
  assert {
    condition     = var.pool.spot == false && var.pool.disk_gb == 100 && var.pool.gpu == null && length(var.ports) == 0
    error_message = "defaults: on demand, 100 GB, nothing served"
  }
}

run "a_name_that_a_cloud_would_refuse" {
  command = plan
  variables {
    pool = { name = "Aws_EU", role = "engine", region = "eu-central-1", machine_types = ["g6.xlarge"], min = 1, max = 4 }
  }
  expect_failures = [var.pool]
}

run "a_role_that_nobody_plays" {
  command = plan
  variables {
    pool  = { name = "aws-eu", role = "proxy", region = "eu-central-1", machine_types = ["g6.xlarge"], min = 1, max = 4 }
    ports = {}
  }
  expect_failures = [var.pool]
}

run "more_at_least_than_at_most" {
  command = plan
  variables {
    pool = { name = "aws-eu", role = "engine", region = "eu-central-1", machine_types = ["g6.xlarge"], min = 5, max = 4 }
  }
  expect_failures = [var.pool]
}

run "no_machine_type" {
  command = plan
  variables {
    pool = { name = "aws-eu", role = "engine", region = "eu-central-1", machine_types = [], min = 1, max = 4 }
  }
  expect_failures = [var.pool]
}

run "a_gateway_on_a_spot_machine" {
  command = plan
  variables {
    pool  = { name = "gw-a", role = "gateway", region = "eu-central-1", machine_types = ["m7i.xlarge"], min = 1, max = 1, spot = true }
    ports = { api = 443 }
  }
  expect_failures = [var.pool]
}

run "a_gateway_without_an_api" {
  command = plan
  variables {
    pool = { name = "gw-a", role = "gateway", region = "eu-central-1", machine_types = ["m7i.xlarge"], min = 1, max = 1 }
  }
  expect_failures = [var.ports]
}

run "an_engine_that_lets_somebody_in" {
  command = plan
  variables { ingress_cidrs = ["192.0.2.0/24"] }
  expect_failures = [var.ingress_cidrs]
}

run "half_a_machine" {
  command = plan
  variables {
    pool = { name = "aws-eu", role = "engine", region = "eu-central-1", machine_types = ["g6.xlarge"], min = 0.5, max = 4 }
  }
  expect_failures = [var.pool]
}

run "a_disk_smaller_than_its_image" {
  command = plan
  variables {
    pool = { name = "aws-eu", role = "engine", region = "eu-central-1", machine_types = ["g6.xlarge"], min = 1, max = 4, disk_gb = 8 }
  }
  expect_failures = [var.pool]
}
