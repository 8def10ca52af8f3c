# This project with its Airflow: the image of every Airflow service and simulated server in docker-compose.yaml, and
# of the Helm chart (deploy/helm-values.yaml). Models are not served from it: vLLM has images of its own.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# The user and folder that Airflow's Helm chart expects. Group 0, so that any user id may write there.
RUN useradd --uid 50000 --gid 0 --create-home airflow \
 && install -d -o 50000 -g 0 -m 775 /opt/airflow /opt/airflow/logs /opt/airflow/auth /state /data
WORKDIR /opt/capacity

COPY requirements.txt requirements-image.txt constraints.txt ./
RUN python -m pip install --no-cache-dir --constraint constraints.txt uv \
 && uv pip install --system --no-cache --compile-bytecode --constraint constraints.txt \
      --requirement requirements-image.txt

COPY dags dags
COPY plugins plugins
COPY include include
COPY deploy deploy
ENV PYTHONPATH=/opt/capacity \
    PYTHONUNBUFFERED=1 \
    AIRFLOW_HOME=/opt/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/capacity/dags \
    AIRFLOW__CORE__PLUGINS_FOLDER=/opt/capacity/plugins \
    AIRFLOW__CORE__LOAD_EXAMPLES=False \
    CAPACITY_STATE=/state
USER 50000:0
