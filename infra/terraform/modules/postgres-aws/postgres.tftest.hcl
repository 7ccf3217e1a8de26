provider "aws" {
  region = "eu-central-1"
}

provider "aws" {
  alias  = "standby"
  region = "us-east-1"
}

variables {
  name             = "mico"
  primary          = { vpc = "vpc-a", subnets = ["subnet-a1", "subnet-a2"] }
  standby          = { vpc = "vpc-b", subnets = ["subnet-b1", "subnet-b2"] }
  client_cidrs     = ["10.30.0.0/20", "10.31.0.0/20"]
  password         = "long-enough-and-never-stored"
  password_version = 3
}

run "servers" {
  assert {
    condition = alltrue([
      aws_db_instance.primary.multi_az, aws_db_instance.primary.storage_encrypted, aws_db_instance.primary.deletion_protection,
      aws_db_instance.primary.backup_retention_period == 14, !aws_db_instance.primary.skip_final_snapshot,
      aws_db_instance.primary.password_wo == null, aws_db_instance.primary.password_wo_version == 3,
      aws_db_instance.primary.manage_master_user_password == null,
      one(aws_db_parameter_group.this.parameter).name == "rds.force_ssl", one(aws_db_parameter_group.this.parameter).value == "1",
    ])
    error_message = "two zones, encrypted at rest and on the way, backed up, protected; the password in no state"
  }
  assert {
    condition     = can(regex("^mico-final-[0-9a-f-]{36}$", aws_db_instance.primary.final_snapshot_identifier))
    error_message = "the last snapshot has a name that those of earlier servers of this name don't have"
  }
  assert {
    condition = alltrue([
      aws_db_instance.standby.replicate_source_db == aws_db_instance.primary.arn, aws_db_instance.standby.storage_encrypted,
      aws_db_instance.standby.kms_key_id == aws_kms_key.standby.arn, aws_db_instance.standby.backup_retention_period == 7,
      aws_db_instance.standby.max_allocated_storage == aws_db_instance.primary.max_allocated_storage,
    ])
    error_message = "the replica is encrypted with a key of its own region, grows as its server does, and is backed up once it is promoted"
  }
  assert {
    condition = alltrue([for rules in [aws_vpc_security_group_ingress_rule.primary, aws_vpc_security_group_ingress_rule.standby] : alltrue([
      toset([for rule in rules : rule.cidr_ipv4]) == toset(var.client_cidrs),
      alltrue([for rule in rules : rule.from_port == 5432 && rule.to_port == 5432 && rule.ip_protocol == "tcp"]),
    ])])
    error_message = "only gateways reach the database, those of either region"
  }
}
