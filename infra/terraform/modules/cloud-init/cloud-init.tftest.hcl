variables {
  cloud     = "aws"
  container = { image = "example.com/engine@sha256:0000000000000000000000000000000000000000000000000000000000000000", args = ["site"], gpu = true }
}

run "engine" {
  variables { secrets = ["arn:aws:secretsmanager:eu-central-1:111122223333:secret:site-abcdef"] }
  assert {
    condition     = length(output.user_data) < 16384
    error_message = "EC2 takes 16 KiB at most"
  }
  assert {
    condition     = !strcontains(output.user_data, "haproxy") && !strcontains(output.user_data, "docker.io")
    error_message = "an engine serves no TLS, and its image brings Docker"
  }
}

run "an_image_without_a_digest" {
  command = plan
  variables { container = { image = "example.com/engine:latest", args = ["site"] } }
  expect_failures = [var.container]
}

run "an_argument_that_a_unit_file_would_change" {
  command = plan
  variables { container = { image = "example.com/engine@sha256:0000000000000000000000000000000000000000000000000000000000000000", args = ["site; reboot"] } }
  expect_failures = [var.container]
}

run "a_setting_of_two_lines" {
  command = plan
  variables {
    container = { image = "example.com/engine@sha256:0000000000000000000000000000000000000000000000000000000000000000", args = ["site"], settings = { A = "1\n2" } }
  }
  expect_failures = [var.container]
}

run "a_setting_whose_name_no_environment_takes" {
  command = plan
  variables {
    container = { image = "example.com/engine@sha256:0000000000000000000000000000000000000000000000000000000000000000", args = ["site"], settings = { "MICO SITE" = "1" } }
  }
  expect_failures = [var.container]
}
