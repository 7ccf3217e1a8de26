# The gateways' database: RDS for PostgreSQL over two zones, and an encrypted replica in another region that is promoted by hand if
# the first region is lost. The password is never in a plan or a state.

terraform {
  required_version = ">= 1.11"
  required_providers {
    aws = {
      source                = "hashicorp/aws"
      version               = ">= 5.100, < 7.0"
      configuration_aliases = [aws.standby]
    }
  }
}

variable "name" {
  description = "Name of the database server and of everything around it."
  type        = string
}

variable "instance_class" {
  description = "Machine type of the server and of its replica."
  type        = string
  default     = "db.m7g.large"
}

variable "primary" {
  description = "Network of the server: VPC and subnets in two zones."
  type        = object({ vpc = string, subnets = list(string) })
}

variable "standby" {
  description = "Network of the replica, in the region of provider aws.standby."
  type        = object({ vpc = string, subnets = list(string) })
}

variable "client_cidrs" {
  description = "Private ranges of the gateways' networks, in all regions."
  type        = list(string)
}

variable "password" { # RDS refuses a PostgreSQL replica of a server whose password it manages itself
  description = "Password of the database's owner."
  type        = string
  ephemeral   = true
  sensitive   = true
}

variable "password_version" {
  description = "Raise it when the password changes."
  type        = number
}

variable "protect" {
  description = "Refuse to delete the servers, and keep a last snapshot."
  type        = bool
  default     = true
}

resource "aws_db_subnet_group" "primary" {
  name       = var.name
  subnet_ids = var.primary.subnets
}

resource "aws_db_subnet_group" "standby" {
  provider   = aws.standby
  name       = var.name
  subnet_ids = var.standby.subnets
}

resource "aws_security_group" "primary" {
  name        = "${var.name}-db"
  description = "Postgres, from the gateways"
  vpc_id      = var.primary.vpc
}

resource "aws_security_group" "standby" {
  provider    = aws.standby
  name        = "${var.name}-db"
  description = "Postgres, from the gateways"
  vpc_id      = var.standby.vpc
}

resource "aws_vpc_security_group_ingress_rule" "primary" {
  for_each          = toset(var.client_cidrs)
  security_group_id = aws_security_group.primary.id
  description       = "Gateways"
  cidr_ipv4         = each.value
  from_port         = 5432
  to_port           = 5432
  ip_protocol       = "tcp"
}

resource "aws_vpc_security_group_ingress_rule" "standby" {
  provider          = aws.standby
  for_each          = toset(var.client_cidrs)
  security_group_id = aws_security_group.standby.id
  description       = "Gateways"
  cidr_ipv4         = each.value
  from_port         = 5432
  to_port           = 5432
  ip_protocol       = "tcp"
}

resource "aws_kms_key" "standby" { # a replica cannot use another region's key
  provider            = aws.standby
  description         = "${var.name}: storage of the replica"
  enable_key_rotation = true
}

resource "aws_db_parameter_group" "this" {
  name_prefix = "${var.name}-"
  family      = "postgres17"
  parameter {
    name  = "rds.force_ssl"
    value = "1"
  }
  lifecycle { create_before_destroy = true }
}

resource "terraform_data" "life" {} # its id is another after each destroy: a snapshot outlives its server, and keeps its name

resource "aws_db_instance" "primary" {
  identifier                      = var.name
  engine                          = "postgres"
  engine_version                  = "17"
  instance_class                  = var.instance_class
  allocated_storage               = 50
  max_allocated_storage           = 500
  storage_type                    = "gp3"
  storage_encrypted               = true
  multi_az                        = true
  db_name                         = "mico"
  username                        = "mico"
  password_wo                     = var.password
  password_wo_version             = var.password_version
  db_subnet_group_name            = aws_db_subnet_group.primary.name
  vpc_security_group_ids          = [aws_security_group.primary.id]
  parameter_group_name            = aws_db_parameter_group.this.name
  backup_retention_period         = 14
  performance_insights_enabled    = true
  copy_tags_to_snapshot           = true
  auto_minor_version_upgrade      = true
  enabled_cloudwatch_logs_exports = ["postgresql", "upgrade"]
  deletion_protection             = var.protect
  skip_final_snapshot             = !var.protect
  final_snapshot_identifier       = "${var.name}-final-${terraform_data.life.id}"
}

resource "aws_db_instance" "standby" {
  provider                        = aws.standby
  identifier                      = "${var.name}-standby"
  replicate_source_db             = aws_db_instance.primary.arn
  instance_class                  = var.instance_class
  max_allocated_storage           = aws_db_instance.primary.max_allocated_storage # or it is full when its server has grown
  storage_encrypted               = true
  kms_key_id                      = aws_kms_key.standby.arn
  db_subnet_group_name            = aws_db_subnet_group.standby.name
  vpc_security_group_ids          = [aws_security_group.standby.id]
  backup_retention_period         = 7 # without it, a promoted replica would have no way back
  performance_insights_enabled    = true
  copy_tags_to_snapshot           = true
  auto_minor_version_upgrade      = true
  enabled_cloudwatch_logs_exports = ["postgresql", "upgrade"]
  deletion_protection             = var.protect
  skip_final_snapshot             = true
}

output "addresses" {
  description = "Host names of the server and of its replica; both listen on port 5432 and accept TLS only."
  value       = { primary = aws_db_instance.primary.address, standby = aws_db_instance.standby.address }
}
