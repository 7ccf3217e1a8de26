# Plans only: the real provider answers them too, with no account and nothing but a stand-in for the zones.

provider "aws" {
  region                      = "eu-central-1"
  access_key                  = "none"
  secret_key                  = "none"
  skip_credentials_validation = true
  skip_metadata_api_check     = true
  skip_requesting_account_id  = true
}

override_data {
  target = module.network.data.aws_availability_zones.this
  values = { names = ["eu-central-1a", "eu-central-1b", "eu-central-1c"] }
}

variables {
  user_data = "#cloud-config\n"
  secrets   = ["arn:aws:secretsmanager:eu-central-1:111122223333:secret:site-abcdef"]
  tags      = { project = "mico" }
}

run "engine" {
  command = plan
  variables {
    pool = {
      name          = "aws-eu", role = "engine", region = "eu-central-1", min = 1, max = 4, spot = true
      machine_types = ["g6.xlarge", "g5.xlarge"], gpu = { type = "nvidia-l4", count = 1 }, disk_gb = 150
    }
  }
  assert {
    condition     = sort(keys(output.pool)) == tolist(["cloud", "endpoint", "group", "identity", "name", "network", "region", "role"])
    error_message = "the output has the shape that all pools share"
  }
  assert {
    condition     = output.pool.endpoint == null && length(aws_lb.this) == 0 && length(aws_lb_target_group.this) == 0
    error_message = "an engine has no balancer"
  }
  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.port) == 0
    error_message = "an engine has no inbound rule at all"
  }
  assert {
    condition     = aws_vpc_security_group_egress_rule.all.cidr_ipv4 == "0.0.0.0/0" && aws_vpc_security_group_egress_rule.all.ip_protocol == "-1"
    error_message = "an engine reaches the registry and the gateways"
  }
  assert {
    condition     = jsondecode(aws_iam_role_policy.secrets[0].policy) == jsondecode(jsonencode({ Version = "2012-10-17", Statement = [{ Effect = "Allow", Action = "secretsmanager:GetSecretValue", Resource = var.secrets }] }))
    error_message = "the machines may read their own secrets and nothing else"
  }
  assert {
    condition     = jsondecode(aws_iam_role.this.assume_role_policy) == jsondecode(jsonencode({ Version = "2012-10-17", Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }] }))
    error_message = "only machines take the role"
  }
  assert {
    condition     = aws_iam_role_policy_attachment.session.policy_arn == "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
    error_message = "a shell needs no open port"
  }
  assert {
    condition = alltrue([
      aws_launch_template.this.metadata_options[0].http_endpoint == "enabled",
      aws_launch_template.this.metadata_options[0].http_tokens == "required",
      aws_launch_template.this.metadata_options[0].http_put_response_hop_limit == 1,
    ])
    error_message = "the metadata service answers the machine itself, with a session only"
  }
  assert {
    condition = alltrue([
      aws_launch_template.this.image_id == "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
      aws_launch_template.this.user_data == base64encode(var.user_data),
      aws_launch_template.this.update_default_version,
      aws_launch_template.this.block_device_mappings[0].device_name == "/dev/sda1",
      aws_launch_template.this.block_device_mappings[0].ebs[0].volume_size == 150,
      aws_launch_template.this.block_device_mappings[0].ebs[0].volume_type == "gp3",
      tobool(aws_launch_template.this.block_device_mappings[0].ebs[0].encrypted),
      tobool(aws_launch_template.this.block_device_mappings[0].ebs[0].delete_on_termination),
      toset(aws_launch_template.this.tag_specifications[*].resource_type) == toset(["instance", "volume"]),
      alltrue([for each in aws_launch_template.this.tag_specifications : each.tags == tomap({ Name = "aws-eu", project = "mico", role = "engine" })]),
    ])
    error_message = "the machine: image, first boot, one encrypted disk of the asked size that goes with it, tags"
  }
  assert {
    condition = alltrue([
      aws_autoscaling_group.this.min_size == 1,
      aws_autoscaling_group.this.max_size == 4,
      aws_autoscaling_group.this.health_check_type == "EC2",
      aws_autoscaling_group.this.health_check_grace_period == 180,
      aws_autoscaling_group.this.capacity_rebalance,
      aws_autoscaling_group.this.wait_for_capacity_timeout == "0",
      aws_autoscaling_group.this.instance_refresh[0].strategy == "Rolling",
      aws_autoscaling_group.this.instance_refresh[0].preferences[0].min_healthy_percentage == 50,
    ])
    error_message = "the group: its size, no wait for GPUs, engines replaced half at a time"
  }
  assert {
    condition = alltrue([
      aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 0,
      aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].on_demand_allocation_strategy == "prioritized",
      aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].spot_allocation_strategy == "capacity-optimized-prioritized",
      aws_autoscaling_group.this.mixed_instances_policy[0].launch_template[0].override[*].instance_type == tolist(["g6.xlarge", "g5.xlarge"]),
    ])
    error_message = "a spot pool buys spot machines only, where there is most room, in the order asked for"
  }
  assert {
    condition = alltrue([
      aws_iam_role.this.name_prefix == "aws-eu-", aws_iam_role.this.tags["Name"] == "aws-eu",
      aws_iam_instance_profile.this.name_prefix == "aws-eu-",
      aws_security_group.this.name_prefix == "aws-eu-", aws_security_group.this.tags["Name"] == "aws-eu",
      aws_launch_template.this.name_prefix == "aws-eu-", aws_launch_template.this.tags["Name"] == "aws-eu",
      aws_autoscaling_group.this.name_prefix == "aws-eu-",
    ])
    error_message = "everything carries the pool's name"
  }
}

run "gateway" {
  command = plan
  variables {
    pool          = { name = "gw-a", role = "gateway", region = "eu-central-1", machine_types = ["m7i.xlarge"], min = 1, max = 1 }
    ports         = { api = 443, sites = 8443 }
    ingress_cidrs = ["0.0.0.0/0"]
  }
  assert {
    condition     = aws_launch_template.this.image_id == "resolve:ssm:/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
    error_message = "a gateway needs no GPU driver"
  }
  assert {
    condition = toset([for rule in aws_vpc_security_group_ingress_rule.port : "${rule.description} ${rule.cidr_ipv4} ${rule.from_port}-${rule.to_port}/${rule.ip_protocol}"]) == toset([
      "api 0.0.0.0/0 443-443/tcp", "api 10.20.0.0/20 443-443/tcp", "sites 0.0.0.0/0 8443-8443/tcp", "sites 10.20.0.0/20 8443-8443/tcp",
    ])
    error_message = "the served ports are open, and nothing else"
  }
  assert {
    condition = alltrue([
      aws_lb.this[0].name == "gw-a", aws_lb.this[0].load_balancer_type == "network",
      aws_lb.this[0].enable_cross_zone_load_balancing, aws_lb.this[0].tags["Name"] == "gw-a",
    ])
    error_message = "a network balancer over both zones"
  }
  assert {
    condition = alltrue([for name, port in var.ports : alltrue([
      aws_lb_listener.this[name].port == port, aws_lb_listener.this[name].protocol == "TCP",
      aws_lb_listener.this[name].default_action[0].type == "forward",
      aws_lb_target_group.this[name].name == "gw-a-${name}", aws_lb_target_group.this[name].port == port,
      aws_lb_target_group.this[name].protocol == "TCP", aws_lb_target_group.this[name].tags["Name"] == "gw-a",
    ])])
    error_message = "each port is passed through unchanged"
  }
  assert {
    condition = alltrue([for group in aws_lb_target_group.this : alltrue([
      tonumber(group.deregistration_delay) == 300, group.health_check[0].protocol == "HTTPS", group.health_check[0].port == "443",
      group.health_check[0].path == "/health", group.health_check[0].interval == 10,
      group.health_check[0].healthy_threshold == 2, group.health_check[0].unhealthy_threshold == 10,
    ])])
    error_message = "health is asked at the API; streams under way may end"
  }
  assert {
    condition = alltrue([
      aws_autoscaling_group.this.health_check_type == "ELB",
      !aws_autoscaling_group.this.capacity_rebalance,
      aws_autoscaling_group.this.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 100,
      aws_autoscaling_group.this.instance_refresh[0].preferences[0].min_healthy_percentage == 100,
    ])
    error_message = "gateways run on demand, are replaced when they do not answer, and one by one"
  }
}

run "a_pool_without_secrets_may_read_none" {
  command = plan
  variables {
    pool    = { name = "aws-eu", role = "engine", region = "eu-central-1", machine_types = ["g6.xlarge"], min = 0, max = 1 }
    secrets = []
  }
  assert {
    condition     = length(aws_iam_role_policy.secrets) == 0
    error_message = "no policy"
  }
}
