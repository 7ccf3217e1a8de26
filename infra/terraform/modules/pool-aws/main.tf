# A pool on EC2: an auto scaling group, the identity of its machines, and for gateways (balancer.tf) a way in.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = { source = "hashicorp/aws", version = ">= 5.100, < 7.0" }
  }
}

locals {
  gateway = var.pool.role == "gateway"
  image = {
    engine  = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    gateway = "resolve:ssm:/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
  }
  tags = merge(var.tags, { Name = var.pool.name, role = var.pool.role })
}

module "network" {
  source = "../network-aws"
  name   = var.pool.name
  cidr   = var.cidr
  public = local.gateway
  tags   = local.tags
}

resource "aws_security_group" "this" {
  name_prefix = "${var.pool.name}-"
  description = "Pool ${var.pool.name}"
  vpc_id      = module.network.network.id
  tags        = local.tags
  lifecycle { create_before_destroy = true }
}

resource "aws_vpc_security_group_egress_rule" "all" {
  security_group_id = aws_security_group.this.id
  description       = "Registry, secrets, model weights, gateways"
  cidr_ipv4         = "0.0.0.0/0"
  ip_protocol       = "-1"
}

resource "aws_iam_role" "this" {
  name_prefix = "${var.pool.name}-"
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "sts:AssumeRole", Principal = { Service = "ec2.amazonaws.com" } }]
  })
  tags = local.tags
}

resource "aws_iam_role_policy" "secrets" {
  count = length(var.secrets) > 0 ? 1 : 0
  name  = "read-own-secrets"
  role  = aws_iam_role.this.id
  policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Action = "secretsmanager:GetSecretValue", Resource = var.secrets }]
  })
}

resource "aws_iam_role_policy_attachment" "session" { # a shell by way of AWS's own sign-in, with no port open
  role       = aws_iam_role.this.name
  policy_arn = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"
}

resource "aws_iam_instance_profile" "this" {
  name_prefix = "${var.pool.name}-"
  role        = aws_iam_role.this.name
}

resource "aws_launch_template" "this" {
  name_prefix            = "${var.pool.name}-"
  image_id               = local.image[var.pool.role]
  user_data              = base64encode(var.user_data)
  update_default_version = true
  vpc_security_group_ids = [aws_security_group.this.id]
  iam_instance_profile { arn = aws_iam_instance_profile.this.arn }
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required" # IMDSv2 only
    http_put_response_hop_limit = 1          # the machine itself, no container on a bridge
  }
  block_device_mappings {
    device_name = "/dev/sda1"
    ebs {
      volume_size           = var.pool.disk_gb
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }
  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume"])
    content {
      resource_type = tag_specifications.value
      tags          = local.tags
    }
  }
  tags = local.tags
}

resource "aws_autoscaling_group" "this" {
  name_prefix               = "${var.pool.name}-"
  min_size                  = var.pool.min
  max_size                  = var.pool.max
  vpc_zone_identifier       = module.network.network.subnets
  target_group_arns         = [for group in aws_lb_target_group.this : group.arn]
  health_check_type         = local.gateway ? "ELB" : "EC2" # an engine serves no port to ask; systemd restarts its process
  health_check_grace_period = 180
  capacity_rebalance        = var.pool.spot
  wait_for_capacity_timeout = "0" # GPUs may be sold out; the gateways route round the site
  mixed_instances_policy {
    instances_distribution {
      on_demand_percentage_above_base_capacity = var.pool.spot ? 0 : 100
      on_demand_allocation_strategy            = "prioritized"
      spot_allocation_strategy                 = "capacity-optimized-prioritized"
    }
    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.this.id
        version            = aws_launch_template.this.latest_version
      }
      dynamic "override" {
        for_each = var.pool.machine_types
        content { instance_type = override.value }
      }
    }
  }
  instance_refresh { # a new version: gateways one by one, engines, which are scarce and never wait for a successor, half at a time
    strategy = "Rolling"
    preferences { min_healthy_percentage = local.gateway ? 100 : 50 }
  }
  lifecycle { ignore_changes = [desired_capacity] } # a scaler owns it
}

output "pool" {
  description = "The running pool, in the shape that all pool modules share."
  value = {
    name     = var.pool.name
    cloud    = "aws"
    region   = var.pool.region
    role     = var.pool.role
    endpoint = one(aws_lb.this[*].dns_name)
    identity = aws_iam_role.this.arn
    group    = aws_autoscaling_group.this.name
    network  = module.network.network
  }
}
