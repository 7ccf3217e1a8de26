# What refers to what: known after apply, so only the stub provider runs this file.

provider "aws" {
  region = "eu-central-1"
}

override_data {
  target = module.network.data.aws_availability_zones.this
  values = { names = ["eu-central-1a", "eu-central-1b", "eu-central-1c"] }
}

run "gateway" {
  variables {
    pool          = { name = "gw-a", role = "gateway", region = "eu-central-1", machine_types = ["m7i.xlarge"], min = 1, max = 1 }
    user_data     = "#cloud-config\n"
    ports         = { api = 443 }
    ingress_cidrs = ["0.0.0.0/0"]
    secrets       = ["arn:aws:secretsmanager:eu-central-1:111122223333:secret:gateway-abcdef"]
  }
  assert {
    condition = alltrue([
      aws_security_group.this.vpc_id == output.pool.network.id,
      aws_lb_target_group.this["api"].vpc_id == output.pool.network.id,
      aws_lb.this[0].subnets == toset(output.pool.network.subnets),
      aws_autoscaling_group.this.vpc_zone_identifier == toset(output.pool.network.subnets),
    ])
    error_message = "all of it stands in the pool's network"
  }
  assert {
    condition = alltrue([
      aws_autoscaling_group.this.mixed_instances_policy[0].launch_template[0].launch_template_specification[0].launch_template_id == aws_launch_template.this.id,
      aws_autoscaling_group.this.mixed_instances_policy[0].launch_template[0].launch_template_specification[0].version == tostring(aws_launch_template.this.latest_version),
      aws_launch_template.this.vpc_security_group_ids == toset([aws_security_group.this.id]),
      aws_launch_template.this.iam_instance_profile[0].arn == aws_iam_instance_profile.this.arn,
      aws_iam_instance_profile.this.role == aws_iam_role.this.name,
      aws_iam_role_policy.secrets[0].role == aws_iam_role.this.id,
    ])
    error_message = "the group starts the newest machine, closed by the pool's rules, with the pool's identity"
  }
  assert {
    condition = alltrue([
      aws_autoscaling_group.this.target_group_arns == toset([aws_lb_target_group.this["api"].arn]),
      aws_lb_listener.this["api"].default_action[0].target_group_arn == aws_lb_target_group.this["api"].arn,
      output.pool.endpoint == aws_lb.this[0].dns_name,
    ])
    error_message = "the balancer leads to the machines"
  }
}
